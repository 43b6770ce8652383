"""Names of add-ons that a rank accepts."""

from __future__ import annotations

import pytest

from safelaunch.beacon import addon_probes


@pytest.mark.parametrize("name", ["../consistency", "consistency.probe", "", "nothing_like_this"])
def test_addon_probes_unknown_name_raises_import_error(name: str) -> None:
    with pytest.raises(ImportError):
        addon_probes.load(name)
