"""Proves a kernel on the CPU: results, races under every schedule, adversarial delays, mutants. See
``--help``.

python -m jax_dsa.verify --control cudnn-1.26.0 --head-dim 576
python -m jax_dsa.verify --control cudnn-1.27.0 --mutate --report reports/cudnn-1.27.0
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile

from jax_dsa.emulator import EmulatorError, controls
from jax_dsa.emulator.controls import study

ARCHS = {"sm_100": "sm_100a", "sm_100a": "sm_100a", "sm_100f": "sm_100f", "sm_103a": "sm_103a"}
RELEASES = ("cudnn-1.26.0", "cudnn-1.27.0", "cudnn-1.32.0")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_dsa.verify", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument(
        "--control", choices=RELEASES, required=True, help="a public kernel, installed by name"
    )
    parser.add_argument("--op", choices=("backward", "forward"), default="backward")
    parser.add_argument(
        "--arch", choices=tuple(ARCHS), default="sm_100", help="the target to compile for"
    )
    parser.add_argument("--head-dim", type=int, choices=(512, 576), default=576)
    parser.add_argument("--topk", type=int, default=128, help="slots per query, a multiple of 64")
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument(
        "--mutate", action="store_true", help="delete each ordering element in turn"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one schedule, and delays at a few sites only"
    )
    parser.add_argument(
        "--report",
        type=pathlib.Path,
        help="folder for Markdown, timeline picture and Perfetto JSON",
    )
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        help="keeps packages and PTX between runs (default: temporary)",
    )
    parser.add_argument(
        "--python", default=sys.executable, help="an interpreter that has nvidia-cutlass-dsl"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when everything is clean, 1 when something was found, 2 when it could not run."""
    options = arguments().parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return _verify(options, folder)
        except EmulatorError as error:
            print(f"could not verify: {error}", file=sys.stderr)
            return 2


def _verify(options, folder: pathlib.Path) -> int:
    release = options.control.removeprefix("cudnn-")
    source = controls.Source(
        release, options.op, options.head_dim, options.topk, ARCHS[options.arch]
    )
    if options.op == "forward" and release != "1.32.0":
        raise EmulatorError(
            f"{options.control} has no forward that is a control; use --control cudnn-1.32.0."
        )
    compiled = controls.compile_peer(source, folder, options.python)
    case = study.case_of(source, options.queries)
    subject = study.subject_of(compiled, case)
    result = study.Study(subject, quick=options.quick, mutate=options.mutate, progress=_progress)
    result.run()
    print(result.table())
    if options.report:
        result.write(options.report)
        print(f"report: {options.report}")
    return 0 if result.clean else 1


def _progress(done: int, total: int, what: str) -> None:
    """A bar on standard error, redrawn in place."""
    if not sys.stderr.isatty():
        return
    filled = 30 * done // max(total, 1)
    end = "\n" if done == total else ""
    print(
        f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{total} {what[:60]:60}",
        end=end,
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
