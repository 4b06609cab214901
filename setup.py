"""Compiles the native CPU kernels into ``ppo_ops/kernels/_native.so``; everything else is in pyproject.toml.

The library needs neither Python's nor torch's headers and is loaded with ctypes, so one wheel a platform serves every
Python. Without a working C compiler the package installs all the same and uses its ATen kernels.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]


class BuildNative(build_ext):
    """Calls ``$CC`` (default ``cc``) itself; the extension is optional, so a failure is a warning."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        output.unlink(missing_ok=True)
        compiler, flags = shlex.split(os.environ.get("CC", "cc")), shlex.split(os.environ.get("CFLAGS", ""))
        try:
            subprocess.run([*compiler, *FLAGS, *flags, *ext.sources, "-o", str(output), "-lm"], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"ppo_ops will use its ATen kernels on CPU: {error}") from error

    def copy_extensions_to_source(self) -> None:
        """Editable installs. The old library goes first: it may be mapped by a process, or the new one not built."""
        for ext in self.extensions:
            Path(self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()


class PlatformWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform>: no Python ABI is involved."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "ppo_ops.kernels._native",
            sources=["ppo_ops/kernels/native.c"],
            depends=[str(path) for path in Path("ppo_ops/kernels").glob("native_*.inc")],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
