"""Examinations: ``service.Examiner``."""

from __future__ import annotations

from safelaunch import addons
from safelaunch.addons.slow.service import Examiner


def test_nodes_find_the_service_by_its_name() -> None:
    assert isinstance(addons.service(Examiner.name), Examiner)
    found = addons.service("record")
    assert found is not None and found.name == "record" and addons.service("other") is None
