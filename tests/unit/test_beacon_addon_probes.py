"""Names of add-ons that a rank accepts."""

from __future__ import annotations

import pytest

from safelaunch.beacon import addon_probes


@pytest.mark.parametrize("name", ["../consistency", "consistency.probe", "", "nothing_like_this"])
def test_a_name_that_is_no_add_on_is_refused(name: str) -> None:
    with pytest.raises(ImportError):
        addon_probes.load(name)
