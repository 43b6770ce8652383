"""Makes the links of README absolute in the package's metadata: a package index lacks the files they lead to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
