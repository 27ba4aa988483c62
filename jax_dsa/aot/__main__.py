"""Compiles the package's kernels, without a GPU, and says what each takes.

    python -m jax_dsa.aot [--arch sm_90a] [--out FOLDER] [--list]

Compiles only what FOLDER lacks or has from other sources, tools or options. Needs
nvidia-cutlass-dsl (pip install 'jax_dsa[kernels]'). Exit code 0; 1 when a kernel failed or was
refused; 2 when nothing could be tried.
"""

import argparse
import sys

from jax_dsa.aot import builder, table
from jax_dsa.cubins import store


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m jax_dsa.aot", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument(
        "--arch", action="append", choices=sorted(builder.MODULES), help="repeatable; default: all"
    )
    made.add_argument(
        "--out",
        help="folder; default JAX_DSA_CACHE_DIR, else jax_dsa in the user's cache directory",
    )
    made.add_argument("--list", action="store_true", help="say what is there and compile nothing")
    made.add_argument("--jobs", type=int, help="compilers at a time, default one per core")
    made.add_argument(
        "--opt-level", type=int, default=3, choices=(0, 1, 2, 3), help="of ptxas, default 3"
    )
    made.add_argument("--force", action="store_true", help="compile also what is up to date")
    made.add_argument("--prune", action="store_true", help="remove everything else from the folder")
    made.add_argument("--modules", nargs="+", help="other modules with KERNELS to compile")
    return made


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    archs = args.arch or sorted(builder.MODULES)
    out = args.out or store.default_cache()
    if builder.available() is None and not args.list:
        print(f"compiling needs {builder.DISTRIBUTION}: pip install 'jax_dsa[kernels]'")
        return 2
    try:
        if args.list:
            print(table.listing(archs, store.Store(out), args.modules, args.opt_level))
        else:
            print(table.report(_build(args, archs, out)))
    except builder.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _build(args: argparse.Namespace, archs, out) -> builder.Report:
    with table.Progress() as progress:
        return builder.build(
            archs, out, modules=args.modules, opt_level=args.opt_level, jobs=args.jobs,
            force=args.force, prune=args.prune, progress=progress,
            waiting=lambda: print(f"waiting for another build in {out}", flush=True),
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
