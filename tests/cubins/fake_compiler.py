"""Stands in for ``aot.worker``: the same commands, cubins made by ``cubin_files``: a script.

FAKE_COMPILER names a JSON file: "folder" (each compile leaves a file in it), "tools", "kernels"
(module -> number of kernels), "seconds" per compile, and "crash", the index of a kernel whose
compile ends by a signal.
"""

import dataclasses
import json
import os
import pathlib
import signal
import sys
import time
import uuid

import cubin_files


def main(argv: list[str]) -> None:
    settings = json.loads(pathlib.Path(os.environ["FAKE_COMPILER"]).read_text())
    command, target, arch, *rest = argv
    if command == "describe":
        described = [
            {
                "module": module,
                "index": index,
                "entry": dataclasses.asdict(entry(arch, module, index)),
            }
            for module in rest
            for index in range(settings["kernels"][module])
        ]
        answer = {"tools": settings["tools"], "kernels": described}
        pathlib.Path(target).write_text(json.dumps(answer))
        return
    module, index, _ = rest
    (pathlib.Path(settings["folder"]) / f"{module}.{index}.{uuid.uuid4().hex}").touch()
    time.sleep(settings["seconds"])
    if settings["crash"] == int(index):
        os.kill(os.getpid(), signal.SIGSEGV)
    code = f"{module} {index}".encode().ljust(64)
    (pathlib.Path(target) / "kernel.cubin").write_bytes(cubin_files.cubin(arch, code=code))
    (pathlib.Path(target) / "kernel.ptx").write_text(cubin_files.ptx(arch))
    print("ptxas info : (C7517) a remark in line 3\nptxas info : Used 32 registers")


def entry(arch: str, module: str, index: int):
    facts = {"head_dim": 512 + 64 * index, "dtype": "bfloat16"}
    return cubin_files.entry(arch=arch, module=module, op=module.rpartition("_")[2], facts=facts)


if __name__ == "__main__":
    main(sys.argv[1:])
