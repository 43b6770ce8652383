"""What is made as the package is built.

The links of README, made absolute: a package index lacks the files they lead to. And what comes from the same tables as
``--help``: the man page and the shells' completions, in a wheel as in an editable installation.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<target>[^)\s]+)\)")


class AbsoluteLinks(MetadataHookInterface):  # type: ignore[misc]
    """Sets ``readme``, whose links lead to the repository that ``[project.urls]`` names."""

    def update(self, metadata: dict[str, Any]) -> None:
        source = metadata["urls"]["Source"]

        def absolute(found: re.Match[str]) -> str:
            kind = "raw" if found["image"] else "blob"
            return f"{found['image']}[{found['text']}]({source}/{kind}/main/{found['target']})"

        text = LINK.sub(absolute, Path(self.root, "README.md").read_text("utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class Generated(BuildHookInterface):  # type: ignore[misc]
    """Adds the man page and the completions, by ``scripts/build/generate.py``.

    A wheel gets them from a temporary directory: the source tree may be read-only, such as a clone of another user.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sys.path.insert(0, self.root)
        from scripts.build.generate import COMPLETIONS, MAN_PAGE, write

        self._scratch = tempfile.TemporaryDirectory()
        made = Path(self.root if version == "editable" else self._scratch.name)
        write(made)
        build_data["shared_data"] = {
            str(made / MAN_PAGE): "share/man/man1/safelaunch.1",
            str(made / COMPLETIONS / "safelaunch.bash"): "share/bash-completion/completions/safelaunch",
            str(made / COMPLETIONS / "_safelaunch"): "share/zsh/site-functions/_safelaunch",
            str(made / COMPLETIONS / "safelaunch.fish"): "share/fish/vendor_completions.d/safelaunch.fish",
        }
        if version != "editable":
            build_data["force_include"][str(made / COMPLETIONS)] = str(COMPLETIONS)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._scratch.cleanup()
