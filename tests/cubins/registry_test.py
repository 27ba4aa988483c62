"""Finding kernels: order of folders, damage, other sources, building on a miss, what errors say."""

import os
import pathlib
import sys
import tempfile
import threading
import time
from unittest import mock

import cubin_files
from absl.testing import absltest, parameterized

from jax_dsa import aot
from jax_dsa.cubins import registry, sources, store

FACTS = {"head_dim": 512, "dtype": "bfloat16"}
MODULE = "fake_kernel"


class RegistryTestCase(parameterized.TestCase):
    """Two folders, ``data`` and ``cache``, and a module that kernels are compiled from."""

    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.enter_context(mock.patch.object(sys, "path", [str(self.root), *sys.path]))
        (self.root / f"{MODULE}.py").write_text("KERNELS = ()\n")
        self.data, self.cache = self.root / "data", self.root / "cache"
        self.built = []

    def over(self, builder=None) -> registry.Registry:
        return registry.Registry([self.data, self.cache], builder)

    def put(self, folder: pathlib.Path, *, cubin=None, **changes):
        hashes = {"source": sources.source_hash(MODULE), "build": ""}
        fields = {"symbol": "k", "module": MODULE, "hashes": hashes, "facts": FACTS} | changes
        entry = cubin_files.entry(**fields)
        code = f"{folder} {entry.op}".encode().ljust(256)
        return store.Store(folder).add(
            entry, cubin or cubin_files.cubin(entry.arch, code=code), cubin_files.ptx(entry.arch)
        )

    def builder(self, arch: str) -> None:
        self.built.append(arch)
        self.put(self.cache, arch=arch)

    def missing(self, wanted: str, found: registry.Registry, arch="sm_90a", op="forward", **facts):
        with self.assertRaisesRegex(registry.KernelMissing, wanted):
            found.find(arch, op, FACTS | facts)


class FindTest(RegistryTestCase):
    def test_package_data_comes_first(self):
        self.put(self.cache)
        self.assertEqual(self.over().find("sm_90a", "forward", FACTS).folder, self.cache)
        entry = self.put(self.data)
        found = self.over(self.builder).find("sm_90a", "forward", FACTS)
        self.assertEqual(found.folder, self.data)
        self.assertEqual(found.entry, entry)
        self.assertEqual(store.digest(found.cubin), entry.hashes["cubin"])
        self.assertEqual(self.built, [])

    def test_built_on_a_miss_once(self):
        found = self.over(self.builder)
        self.assertEqual(found.find("sm_90a", "forward", FACTS).folder, self.cache)
        found.find("sm_90a", "forward", FACTS)
        self.missing("sm_90a forward serves: head_dim=512, dtype=bfloat16", found, head_dim=64)
        self.missing("no compiled kernel for sm_90a backward", found, op="backward")
        self.assertEqual(self.built, ["sm_90a"])

    def test_not_built_when_told_not_to(self):
        found = self.over(self.builder)
        self.assertRegex(found.reason("sm_90a", "forward", FACTS) or "", "no compiled kernel")
        self.assertEqual(self.built, [])
        self.assertIsNone(found.reason("sm_90a", "forward", FACTS, build=True))

    def test_threads_wait_for_one_build(self):
        def slow(arch):
            time.sleep(0.2)
            self.builder(arch)

        found, results = self.over(slow), []
        work = lambda: results.append(found.find("sm_90a", "forward", FACTS))  # noqa: E731
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertLen(results, 4)
        self.assertEqual(self.built, ["sm_90a"])

    def test_nothing_there(self):
        self.put(self.cache, arch="sm_80")
        found = self.over()
        self.missing(
            "no compiled kernel for sm_90a forward head_dim=512, dtype=bfloat16. Architectures"
            " there: sm_80; looked in .*data, .*cache. To compile: python -m jax_dsa.aot --arch"
            " sm_90a .needs pip install 'jax_dsa.kernels.'",
            found,
        )
        self.assertEqual(found.archs(), ("sm_80",))

    def test_failed_build_says_why(self):
        def fails(arch):
            raise registry.KernelMissing("the compiler is broken")

        self.missing("no compiled kernel.* the compiler is broken", self.over(fails))

    def test_kernels_of_other_sources_do_not_count(self):
        self.put(self.data)
        (self.root / f"{MODULE}.py").write_text("KERNELS = (1,)\n")
        self.missing("data: 1 of sm_90a are of other sources", self.over())
        self.assertEqual(
            self.over(self.builder).find("sm_90a", "forward", FACTS).folder, self.cache
        )
        (self.root / f"{MODULE}.py").unlink()
        self.missing("other sources", self.over())

    def test_entries(self):
        self.put(self.data)
        self.put(self.cache, op="backward")
        self.put(self.cache, arch="sm_80")
        found = self.over(self.builder).entries("sm_90a")
        self.assertEqual([f.entry.op for f in found], ["forward", "backward"])
        self.assertEqual(self.built, [])
        with self.assertRaisesRegex(registry.KernelMissing, "no compiled kernel for sm_100a"):
            self.over().entries("sm_100a")

    def test_architecture_of_a_device(self):
        self.assertEqual(registry.architecture("9.0"), "sm_90a")
        with self.assertRaisesRegex(registry.KernelMissing, r"capability 8.6; .* 9.0 \(sm_90a\)"):
            registry.architecture("8.6")


class DamageTest(RegistryTestCase):
    def damage(self, how: str) -> None:
        entry = self.put(self.data, cubin=cubin_files.cubin("sm_80") if how == "foreign" else None)
        path = store.Store(self.data).path(entry, "cubin")
        whole = path.read_bytes()
        if how == "missing":
            path.unlink()
        elif how != "foreign":
            changed = whole[:100] + b"x" + whole[101:]
            path.write_bytes({"truncated": whole[:-7], "altered": changed, "empty": b""}[how])

    says = {
        "missing": "data/[0-9a-f]{64}.cubin: missing",
        "truncated": "data/[0-9a-f]{64}.cubin: altered .truncated: [0-9]+ bytes of at least",
        "altered": "data/[0-9a-f]{64}.cubin: altered( [^,]+)?, its SHA-256 is now",
        "empty": "data/[0-9a-f]{64}.cubin: altered .no ELF file: 0 bytes",
        "foreign": "data/[0-9a-f]{64}.cubin: compiled for sm_80, not for sm_90a",
    }

    @parameterized.parameters(*says)
    def test_is_named_and_never_returned(self, how):
        self.damage(how)
        wanted = self.says[how] + ".*To compile: python -m jax_dsa.aot --arch sm_90a"
        self.missing(wanted, self.over())
        with self.assertRaisesRegex(registry.KernelMissing, self.says[how]):
            self.over().entries("sm_90a")

    @parameterized.parameters(*says)
    def test_is_compiled_again(self, how):
        self.damage(how)
        self.put(self.data, op="backward")
        found = self.over(self.builder).entries("sm_90a")
        self.assertEqual({f.entry.op for f in found}, {"forward", "backward"})
        self.assertEqual(self.built, ["sm_90a"])

    def test_an_intact_one_elsewhere_serves(self):
        self.damage("truncated")
        self.put(self.cache)
        found = self.over(self.builder)
        self.assertEqual(found.find("sm_90a", "forward", FACTS).folder, self.cache)
        self.assertLen(found.entries("sm_90a"), 1)
        self.assertEqual(self.built, [])

    @parameterized.parameters(b"", b"{", b"[]", b"\xff\xfe", b'{"version": 7}')
    def test_unreadable_manifest(self, content):
        self.put(self.data)
        (path,) = self.data.glob("*.json")
        path.write_bytes(content)
        self.missing(f"{path.name}: ", self.over())

    def test_kernel_that_the_cubin_lacks(self):
        self.put(self.data, cubin=cubin_files.cubin(symbol="other"))
        self.missing(r"has no kernel k, but \['other'\]", self.over())


class DefaultTest(RegistryTestCase):
    def test_cache_folder(self):
        where = lambda **env: str(store.default_cache(env))  # noqa: E731
        self.assertEqual(where(JAX_DSA_CACHE_DIR="/a", XDG_CACHE_HOME="/b"), "/a")
        self.assertEqual(where(XDG_CACHE_HOME="/b"), "/b/jax_dsa")
        self.assertEqual(where(), str(pathlib.Path("~/.cache/jax_dsa").expanduser()))

    def test_folders_and_functions(self):
        self.put(self.cache)
        registry.default.cache_clear()
        self.addCleanup(registry.default.cache_clear)
        data = self.cache.parent / "no_data"
        self.enter_context(mock.patch.object(registry, "DATA", data))
        with mock.patch.dict(os.environ, {"JAX_DSA_CACHE_DIR": str(self.cache)}):
            found = registry.find("sm_90a", "forward", FACTS, build=False)
            self.assertEqual(registry.entries("sm_90a", build=False), (found,))
            self.assertIsNone(registry.reason("sm_90a", "forward", FACTS))
            folders = [kept.folder for kept in registry.default().stores]
        self.assertEqual(folders, [data, self.cache])

    def test_compiling_without_a_compiler(self):
        with mock.patch.object(registry, "COMPILER", "no-such-distribution"):
            with self.assertRaisesRegex(registry.KernelMissing, "no-such-distribution is not inst"):
                registry.compile_on_miss("sm_90a", self.cache)

    def test_compiling_in_a_process_that_fails(self):
        unknown = mock.patch.dict(registry.ARCHITECTURES, {"0.0": "no-such-arch"})
        with mock.patch.object(registry, "COMPILER", "numpy"), unknown:
            with self.assertRaisesRegex(registry.KernelMissing, r"failed: (.|\n)*'no-such-arch'"):
                registry.compile_on_miss("no-such-arch", self.cache)

    def test_an_architecture_without_kernels(self):
        with self.assertNoLogs(), self.assertRaisesRegex(registry.KernelMissing, "No kernels are"):
            registry.compile_on_miss("sm_70", self.cache)
        found = self.over(lambda arch: registry.compile_on_miss(arch, self.cache))
        self.missing("for sm_70 .* No kernels are written for sm_70.*/cache.$", found, arch="sm_70")

    def test_every_device_that_is_served_has_kernels_to_compile(self):
        self.assertEqual(set(registry.ARCHITECTURES.values()), set(aot.MODULES))


class SourcesTest(RegistryTestCase):
    def test_hash_covers_what_is_imported_from_the_package(self):
        package = self.root / "pack"
        (package / "sub").mkdir(parents=True)
        files = {
            "__init__": "", "a": "import os\nfrom pack.sub import b\nimport numpy\n", "other": "",
            "sub/__init__": "", "sub/b": "def f():\n    from .. import c\n", "c": "",
        }  # fmt: skip
        for name, text in files.items():
            (package / f"{name}.py").write_text(text)
        self.assertEqual(
            sources.modules_of("pack.a"), ["pack.a", "pack.c", "pack.sub", "pack.sub.b"]
        )
        first = sources.source_hash("pack.a")
        (package / "other.py").write_text("changed")
        self.assertEqual(sources.source_hash("pack.a"), first)
        (package / "c.py").write_text("changed = 1")
        self.assertNotEqual(sources.source_hash("pack.a"), first)

    def test_a_module_that_is_none(self):
        for name in ("no_such_package", "no_such_package.a", "jax_dsa.no_such_module"):
            with self.assertRaisesRegex(ModuleNotFoundError, f"no source file for module '{name}'"):
                sources.source_hash(name)


if __name__ == "__main__":
    absltest.main()
