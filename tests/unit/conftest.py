"""Every verdict that a unit test asks for also checks the table of rules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.rules import Rule
from safelaunch.verdict.waits import Case


@pytest.fixture(autouse=True, scope="session")
def rules_conclude_what_they_declare() -> Iterator[None]:
    ask = Rule.ask

    def asked(rule: Rule, case: Case) -> Ruling:
        ruling = ask(rule, case)
        if isinstance(ruling, Finding):
            assert ruling.cause in rule.concludes, f"{rule.name} concludes {ruling.cause}, which it does not declare"
        return ruling

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rule, "ask", asked)
        yield
