"""Prints the include folders of the bridge, one a line: XLA's FFI headers (jaxlib) and cuda.h."""

import importlib.metadata
import pathlib
import sys

# Distribution -> a header in it, as C++ code includes it.
HEADERS = {"jaxlib": "xla/ffi/api/ffi.h", "nvidia-cuda-runtime": "cuda.h"}


def folder(distribution: str, header: str) -> pathlib.Path:
    """The folder that ``#include <header>`` wants, out of an installed distribution.

    Raises:
        FileNotFoundError: the distribution is not installed or has no such header.
    """
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    wanted = pathlib.PurePosixPath("include", header).parts
    for file in files:
        if file.parts[-len(wanted) :] == wanted:
            return pathlib.Path(str(file.locate())).parents[len(wanted) - 2]
    raise FileNotFoundError(
        f"{header} not found: the Python package {distribution} is not installed here, or lacks it"
    )


def main() -> int:
    try:
        for distribution, header in HEADERS.items():
            print(folder(distribution, header))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
