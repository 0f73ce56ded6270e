"""How does an install get the compiled CPU kernel? Where there is a C compiler; without one it goes on in plain Python.

``HF_KVCACHE_COMPILED=0`` in the environment leaves it out.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledKernel(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles into the package folder of the source tree, which an editable install uses as it is."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library to the wheel, and then the platform to the wheel's name."""
        if self.target_name != "wheel" or os.name != "posix":
            return
        builder = self._builder()
        target = Path(self.root) / "hf_kvcache" / builder.NAME
        target.unlink(missing_ok=True)
        try:
            if os.environ.get("HF_KVCACHE_COMPILED") == "0":
                raise OSError("HF_KVCACHE_COMPILED=0")
            builder.compile_to(target)
        except OSError as error:
            self.app.display_warning(f"hf_kvcache: compiled CPU kernel left out ({error}); torch does its work")
            return
        if version != "editable":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["artifacts"].append(f"/hf_kvcache/{builder.NAME}")
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"

    def _builder(self) -> Any:
        """``hf_kvcache.cpu_build`` without its package, which needs torch."""
        spec = importlib.util.spec_from_file_location("cpu_build", Path(self.root) / "hf_kvcache" / "cpu_build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
