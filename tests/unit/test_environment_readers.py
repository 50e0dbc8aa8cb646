"""Is it read? Of planted source: what counts as a reader, what does not, and what can't be told."""

from __future__ import annotations

import os
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.environment import readers
from lockstep.environment.reachability import Platform
from lockstep.environment.readers import Answer, Package, ask, installed_package
from lockstep.environment.source_scan import scan_source
from tests.unit.environment_planted import DESCRIPTORS, LAMBDAS, plant


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def answer(tmp_path: Path, source: str, name: str = "X_FLAG", platform: Platform | None = None) -> Answer:
    package = plant(tmp_path, "planted", {"module.py": "import os\n" + source})
    return ask(package, [name], platform)[name]


# --- readers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        'value = os.environ["X_FLAG"]',
        'value = os.environ.get("X_FLAG", "0")',
        'value = os.getenv("X_FLAG")',
        'value = os.environ.pop("X_FLAG", None)',
        'from os import environ\nvalue = environ["X_FLAG"]',
        'from os import getenv\nvalue = getenv("X_FLAG")',
        'FLAG = "X_FLAG"\nvalue = os.environ.get(FLAG)',
        'env = os.environ.copy()\nvalue = env.get("X_FLAG")',
        'def f(env=None):\n    env = os.environ if env is None else env\n    return env["X_FLAG"]',
        'for name in ("X_FLAG", "Y_FLAG"):\n    print(os.environ.get(name))',
        'value = os.environ.get("X_FLAG" if os.name == "posix" else "Y_FLAG")',
        'def f(default=os.environ.get("X_FLAG")):\n    return default',
        'def bool_env(name, default="0"):\n    return os.getenv(name, default) == "1"\nuse = bool_env("X_FLAG")',
        'def env_of(*, key):\n    return os.environ[key]\nuse = env_of(key="X_FLAG")',
        'def env(name):\n    return os.getenv(name)\ndef outer(what):\n    return env(what)\nuse = outer("X_FLAG")',
        'def lazy(name):\n    return lambda: os.getenv(name)\nuse = lazy("X_FLAG")',
        'class C:\n    def env(self, name):\n        return os.getenv(name)\nvalue = C().env("X_FLAG")',
        'try:\n    pass\nexcept OSError:\n    value = os.getenv("X_FLAG")',
        'with open("f") as f:\n    match f:\n        case None:\n            value = os.getenv("X_FLAG")',
        'value = [os.getenv(name) for name in ("A_B",)] + [os.getenv("X_FLAG")]',
        'async def f():\n    return os.getenv("X_FLAG")',
    ],
)
def test_a_lookup_is_a_reader(source: str, tmp_path: Path) -> None:
    found = answer(tmp_path, source)
    assert found.read == "read", found
    assert found.places[0].startswith("module.py:")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('# os.environ["X_FLAG"]', "does not know it"),
        ('"""Set X_FLAG to 1: os.environ["X_FLAG"]"""', "does not know it"),
        ('def f():\n    """X_FLAG"""', "does not know it"),
        ('print("set X_FLAG=1")', "does not know it"),
        ('os.environ["X_FLAG"] = "1"', "does not know it"),
        ('os.environ.setdefault("X_FLAG", "1")', "does not know it"),
        ('os.environ.update({"X_FLAG": "1"})', "does not know it"),
        ('os.putenv("X_FLAG", "1")', "does not know it"),
        ('os.environ.pop("X_FLAG", None)', "does not know it"),
        ('del os.environ["X_FLAG"]', "does not know it"),
        ("import copy\nfrom copy import copy as c\nx = copy(os)\ny = c(x)\nz = (lambda: 1)()", "does not know it"),
        ('value = os.getenv("X_FLAG_LONGER") or os.getenv("AN_X_FLAG")', "does not know it"),
        ('if False:\n    value = os.getenv("X_FLAG")', "runs only if `False`"),
        ('if True:\n    pass\nelse:\n    value = os.getenv("X_FLAG")', "runs only if not `True`"),
        ('def f():\n    return 1\n    return os.getenv("X_FLAG")', "never goes on"),
        ('def f():\n    raise OSError\n    os.getenv("X_FLAG")', "never goes on"),
        ('while True:\n    break\n    value = os.getenv("X_FLAG")', "never goes on"),
        (
            'def f(a):\n    if a:\n        return 1\n    else:\n        return 2\n    return os.getenv("X_FLAG")',
            "never goes on",
        ),
        ('if __name__ == "__main__":\n    value = os.getenv("X_FLAG")', "runs only if"),
        ('from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    value = os.getenv("X_FLAG")', "runs only if"),
        ('import sys\nif sys.platform == "win32":\n    value = os.getenv("X_FLAG")', "runs only if"),
        ('value = os.getenv("X_FLAG") if False else None', "runs only if `False`"),
        ('value = False and os.getenv("X_FLAG")', "is False here"),
    ],
)
def test_writes_comments_and_dead_code_are_no_readers(source: str, reason: str, tmp_path: Path) -> None:
    found = answer(tmp_path, source)
    assert found.read == "not read", found
    assert reason in found.reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('def f(what):\n    return os.environ[f"X_{what}"]', "names of the form X_… are built"),
        ('def f(what):\n    return os.getenv("X_" + what)', "names of the form X_…"),
        ('def f(what):\n    return os.getenv("X_%s" % what)', "names of the form X_…"),
        ('def f(what):\n    return os.getenv("X_{}".format(what))', "names of the form X_…"),
        ('def f(what):\n    return os.getenv(f"x_{what}_FLAG".upper() + "") or os.getenv(f"{what}_FLAG")', "…_FLAG"),
        ('for key, value in os.environ.items():\n    if key.startswith("X_"):\n        print(value)', "X_…"),
        ('if "X_FLAG" in os.environ:\n    print("hello")', "only asks whether it is set"),
        ('NAMES = {"X_FLAG": 1}', "not understood"),
        ('def f(read):\n    return read("X_FLAG")', "passed to read, which may read it"),
    ],
)
def test_what_cannot_be_decided_is_unknown(source: str, reason: str, tmp_path: Path) -> None:
    found = answer(tmp_path, source)
    assert (found.read, reason in found.reason) == ("unknown", True), found


def test_a_prefix_of_another_family_decides_nothing(tmp_path: Path) -> None:
    assert answer(tmp_path, 'def f(what):\n    return os.environ[f"Y_{what}"]').read == "not read"


# --- platforms --------------------------------------------------------------------------------------------------------

ONLY_ON_ROCM = [
    'if is_hip():\n    value = os.getenv("X_FLAG")',
    'if not is_hip():\n    pass\nelse:\n    value = os.getenv("X_FLAG")',
    '_is_hip = is_hip()\nif _is_hip:\n    value = os.getenv("X_FLAG")',
    '_use = is_hip() and get()\nif _use:\n    value = os.getenv("X_FLAG")',
    'if current_platform.is_rocm():\n    value = os.getenv("X_FLAG")',
    'if torch.version.hip:\n    value = os.getenv("X_FLAG")',
    'if torch.version.hip is not None:\n    value = os.getenv("X_FLAG")',
    'def f():\n    if not is_hip():\n        return None\n    return os.getenv("X_FLAG")',
    'def f():\n    return is_hip() and os.getenv("X_FLAG") == "1"',
    'def f():\n    return os.getenv("X_FLAG") == "1" and is_hip()',
    'def f():\n    return os.getenv("X_FLAG") if is_hip() else None',
    'if is_cuda() or is_xpu():\n    pass\nelif is_hip():\n    value = os.getenv("X_FLAG")',
]


@pytest.mark.parametrize("source", ONLY_ON_ROCM)
@pytest.mark.parametrize(
    ("platform", "read"), [("rocm", "read"), ("cuda", "not read"), ("cpu", "not read"), (None, "read")]
)
def test_code_behind_a_platform_guard_counts_where_it_runs(
    source: str, platform: Platform | None, read: str, tmp_path: Path
) -> None:
    assert answer(tmp_path, source, platform=platform).read == read


def test_a_guard_that_is_not_understood_leaves_code_reachable(tmp_path: Path) -> None:
    assert answer(tmp_path, 'if has_flashinfer():\n    value = os.getenv("X_FLAG")', platform="cpu").read == "read"


def test_a_flag_that_may_change_is_not_decided(tmp_path: Path) -> None:
    source = (
        "enabled = False\ndef enable():\n    global enabled\n    enabled = True\nif enabled:\n    os.getenv('X_FLAG')"
    )
    assert answer(tmp_path, source).read == "read"


# --- registries -------------------------------------------------------------------------------------------------------


def test_a_descriptor_is_read_where_it_is_used_and_not_where_it_is_declared(tmp_path: Path) -> None:
    declared = DESCRIPTORS + (
        "class Envs:\n"
        "    X_USED = EnvBool(True)\n"
        "    X_DECLARED = EnvBool(True)\n"
        "    X_WRITTEN = EnvBool(False)\n"
        "    X_ASKED = EnvStr('tilelang')\n"
        "    X_NEW = EnvBoolWithAlias(True, deprecated_name='X_OLD')\n"
        "    X_DEAD = EnvBool(True)\n"
        "    X_GETATTR = EnvBool(True)\n"
        "envs = Envs()\n"
    )
    use = (
        "from planted.environ import envs\n"
        "if envs.X_USED.get():\n    pass\n"
        "envs.X_WRITTEN.set(True)\n"
        "if envs.X_ASKED.is_set():\n    pass\n"
        "new = envs.X_NEW.get()\n"
        "if False:\n    envs.X_DEAD.get()\n"
        "# envs.X_DECLARED.get()\n"
        "value = getattr(envs, 'X_GETATTR').get()\n"
    )
    package = plant(tmp_path, "planted", {"environ.py": declared, "use.py": use})
    names = ["X_USED", "X_DECLARED", "X_WRITTEN", "X_ASKED", "X_NEW", "X_OLD", "X_DEAD", "X_GETATTR", "X_NONE"]
    answers = ask(package, names)
    assert {name: found.read for name, found in answers.items()} == {
        "X_USED": "read",
        "X_DECLARED": "not read",
        "X_WRITTEN": "not read",
        "X_ASKED": "read",
        "X_NEW": "read",
        "X_OLD": "read",
        "X_DEAD": "not read",
        "X_GETATTR": "read",
        "X_NONE": "not read",
    }
    assert answers["X_DECLARED"].reason == "planted 1.0 declares it and no code uses it"
    assert answers["X_USED"].places == ("use.py:2",)
    assert (answers["X_USED"].default, answers["X_ASKED"].default) == ("True", "'tilelang'")
    assert "an older name of X_NEW" in answers["X_OLD"].reason


def test_a_descriptor_that_is_told_its_name_is_read_by_its_attribute(tmp_path: Path) -> None:
    source = (
        "import os\nclass EnvBool:\n    def __init__(self, name, default):\n"
        "        self.name, self.default = name, default\n"
        "    def get(self):\n        return os.environ.get(self.name, self.default)\n"
        "class Envs:\n    flag = EnvBool('X_FLAG', False)\n    other = EnvBool('X_OTHER', True)\n"
        "envs = Envs()\nvalue = envs.flag.get()\n"
    )
    answers = ask(plant(tmp_path, "planted", {"environ.py": source}), ["X_FLAG", "X_OTHER"])
    assert [answers[name].read for name in ("X_FLAG", "X_OTHER")] == ["read", "not read"]
    assert answers["X_OTHER"].default == "True"


def test_a_dict_of_lambdas_is_read_by_attribute_import_or_name(tmp_path: Path) -> None:
    use = (
        "import vllm.envs as envs\nfrom vllm.envs import VLLM_IMPORTED\n"
        "if envs.VLLM_USED:\n    pass\n"
        "root = envs.VLLM_CACHE_ROOT\nchoice = envs.VLLM_CHOICE\n"
        "if envs.is_set('VLLM_BY_NAME'):\n    pass\n"
    )
    package = plant(tmp_path, "vllm", {"envs.py": LAMBDAS, "use.py": use}, version="0.32.0")
    names = ["VLLM_USED", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "VLLM_CHOICE", "VLLM_IMPORTED", "VLLM_BY_NAME"]
    unread = ["VLLM_UNUSED", "VLLM_OF_UNUSED", "OTHER_OF_UNUSED", "VLLM_USEF"]
    answers = ask(package, names + unread)
    assert {name: answers[name].read for name in names} == dict.fromkeys(names, "read")
    assert {name: answers[name].read for name in unread} == dict.fromkeys(unread, "not read")
    assert answers["VLLM_USED"].default == "'0'"
    assert answers["VLLM_USEF"].near[0] == "VLLM_USED"


@pytest.mark.parametrize(
    "source",
    [
        # as in SGLang 0.5.17 and 0.5.19: functions, then a dict of objects
        "def _print_deprecated_env(old, new=None):\n    if old in os.environ:\n        warn(old)\n        if new:\n"
        "            os.environ[new] = os.environ[old]\n_print_deprecated_env('X_FLAG')\n"
        "_print_deprecated_env('X_OLD', 'X_NEW')\nvalue = os.getenv('X_NEW')\n",
        "class _DeprecatedEnv:\n    def apply(self, old):\n        if old in os.environ:\n            warn(old)\n"
        "_DEPRECATED_ENVS = {'X_FLAG': _DeprecatedEnv(), 'X_OLD': _DeprecatedEnv(replacement='X_NEW')}\n"
        "for old, one in _DEPRECATED_ENVS.items():\n    one.apply(old)\nvalue = os.getenv('X_NEW')\n",
    ],
)
def test_a_deprecated_name_is_unread_unless_it_is_forwarded(source: str, tmp_path: Path) -> None:
    package = plant(tmp_path, "planted", {"module.py": "import os\n" + source})
    answers = ask(package, ["X_FLAG", "X_OLD"])
    assert (answers["X_FLAG"].read, answers["X_OLD"].read) == ("not read", "read")
    assert "warn" in answers["X_FLAG"].reason


# --- packages ---------------------------------------------------------------------------------------------------------


def test_tests_and_benchmarks_of_a_package_are_no_readers(tmp_path: Path) -> None:
    read = 'import os\nvalue = os.getenv("X_FLAG")\n'
    package = plant(tmp_path, "planted", {"test/utils.py": read, "srt/tests/a.py": read, "benchmark/b.py": read})
    assert ask(package, ["X_FLAG"])["X_FLAG"].read == "not read"


def test_a_wrapper_of_another_file_is_found(tmp_path: Path) -> None:
    files = {
        "utils.py": "import os\ndef flag(name, default=0):\n    return int(os.environ.get(name, default))\n",
        "deep/use.py": "from planted.utils import flag\nvalue = flag('X_FLAG')\n",
    }
    assert ask(plant(tmp_path, "planted", files), ["X_FLAG"])["X_FLAG"].places == ("deep/use.py:2",)


def test_a_name_in_a_library_is_unknown(tmp_path: Path) -> None:
    package = plant(tmp_path, "planted", {"a.py": ""})
    assert package.root is not None
    (package.root / "_C.abi3.so").write_bytes(b"\x7fELF\0X_FLAG\0X_OTHER_LONGER\0")
    answers = ask(package, ["X_FLAG", "X_OTHER"])
    assert answers["X_FLAG"].read == "unknown"
    assert "binary" in answers["X_FLAG"].reason
    assert answers["X_OTHER"].read == "not read"


def test_a_file_that_no_python_parses_makes_unread_names_unknown(tmp_path: Path) -> None:
    package = plant(tmp_path, "planted", {"a.py": "X_FLAG = = 1"})
    assert ask(package, ["X_FLAG"])["X_FLAG"].read == "unknown"


def test_without_source_nothing_is_known() -> None:
    assert ask(Package("sglang", "0.5.14"), ["X_FLAG"])["X_FLAG"].read == "unknown"
    assert installed_package("no_such_package_here") is None


def test_an_installed_package_is_found_without_importing_it() -> None:
    import sys

    before = set(sys.modules)
    package = installed_package("gguf")
    assert package is not None
    assert package.version[0].isdigit()
    assert not {name for name in set(sys.modules) - before if name.startswith("gguf")}


def test_answers_are_kept_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = plant(tmp_path, "planted", {"a.py": 'import os\nvalue = os.getenv("X_FLAG")\n'})
    assert package.root is not None
    assert ask(package, ["X_FLAG"])["X_FLAG"].read == "read"
    monkeypatch.setattr(readers, "scan_source", lambda *_: pytest.fail("the package was scanned again"))
    assert ask(package, ["X_FLAG"])["X_FLAG"].places == ("a.py:2",)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (package.root / "a.py").write_text("import os\n")
    assert ask(package, ["X_FLAG"])["X_FLAG"].read == "not read"


@pytest.mark.parametrize("text", ["", "[]", '{"X_FLAG": {"read": "maybe"}}', '{"X_FLAG": 1}', "\0"])
def test_a_damaged_cache_is_scanned_again(text: str, tmp_path: Path) -> None:
    package = plant(tmp_path, "planted", {"a.py": 'import os\nvalue = os.getenv("X_FLAG")\n'})
    ask(package, ["X_FLAG"])
    (kept,) = (tmp_path / "cache" / "lockstep" / "readers").iterdir()
    kept.write_text(text)
    assert ask(package, ["X_FLAG"])["X_FLAG"].read == "read"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    package = plant(tmp_path, "planted", {"a.py": 'import os\nvalue = os.getenv("X_FLAG")\n'})
    assert ask(package, ["X_FLAG"])["X_FLAG"].read == "read"


@given(name=st.text(string.ascii_uppercase + "_", min_size=3, max_size=12), depth=st.integers(0, 4), live=st.booleans())
def test_however_deep_a_lookup_lies_it_counts_unless_a_false_guard_is_above(name: str, depth: int, live: bool) -> None:
    guards = ["if unknown():", "for _ in range(2):", "with lock:", "try:", "def f():"][:depth]
    lines = [*guards, *([] if live else ["if not True:"])]
    text = "".join("    " * level + line + "\n" for level, line in enumerate(lines))
    text += "    " * len(lines) + f"value = os.getenv({name!r})\n"
    for level in range(len(lines) - 1, -1, -1):
        if lines[level] == "try:":
            text += "    " * level + "finally:\n" + "    " * (level + 1) + "pass\n"
    (site,) = [site for site in scan_source(text).reads if site.name == name]
    assert (site.dead == "") == live


def test_this_package_reads_what_it_says() -> None:
    """The scan on real source that is known: this one."""
    package = installed_package("lockstep")
    assert package is not None
    answers = ask(package, ["XDG_CACHE_HOME", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "OMP_NUM_THREADS", "LOCKSTEP_NOTHING"])
    assert answers["XDG_CACHE_HOME"].read == "read"
    assert any(place.startswith("environment/readers.py") for place in answers["XDG_CACHE_HOME"].places)
    assert answers["LOCKSTEP_NOTHING"].read == "not read"
    assert os.environ.get("LOCKSTEP_NOTHING") is None


def test_a_package_that_takes_too_long_is_given_up_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"a.py": 'import os\nvalue = os.environ["X_FLAG"]', "b.py": 'import os\nvalue = os.environ["Y_FLAG"]'}
    package = plant(tmp_path, "planted", files)
    clock = iter([0.0, 1.0, 2.0, readers.LIMIT_S + 1.0])
    with monkeypatch.context() as patched:
        patched.setattr(readers.time, "monotonic", lambda: next(clock))
        patched.setattr(readers, "LARGE", 1)
        late = ask(package, ["X_FLAG", "Y_FLAG"])
    assert f"files of {package.title}, once for this version" in caplog.text
    assert {late["X_FLAG"].read, late["Y_FLAG"].read} == {"read", "unknown"}
    assert f"given up after {readers.LIMIT_S} s" in late["X_FLAG"].reason + late["Y_FLAG"].reason
    again = ask(package, ["X_FLAG", "Y_FLAG"])
    assert [again[name].read for name in ("X_FLAG", "Y_FLAG")] == ["read", "read"]


@pytest.mark.parametrize("source", ["env = copy(os.environ)", "for key in items(os.environ):\n    pass", "x = copy()"])
def test_a_call_of_a_bare_name_is_no_method(source: str, tmp_path: Path) -> None:
    """``copy(os.environ)`` has no object whose method it is: the scan goes on, and a later lookup counts."""
    assert answer(tmp_path, f'{source}\nvalue = os.environ["X_FLAG"]').read == "read"
