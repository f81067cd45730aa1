# SPDX-License-Identifier: Apache-2.0
"""Gives the page on a package index links that work there: `PHALANX_REPOSITORY=https://github.com/OWNER/phalanx make dist`."""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PackageIndexPage(MetadataHookInterface):
    """Reads the README. Its links are relative, so that they lead to the same commit in every clone; an index needs addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds the README and, if the address of the repository is known, the addresses of the project."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if repository := os.environ.get("PHALANX_REPOSITORY", "").rstrip("/"):
            tag = f"v{metadata['version']}"
            text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{repository}/raw/{tag}/", text)
            text = re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1{repository}/blob/{tag}/", text)
            metadata["urls"] = {
                "Documentation": f"{repository}/blob/{tag}/docs/index.md",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
                "Repository": repository,
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
