"""Which code can run on this platform: a condition of a guard is true, false or undecided.

Decided are constants, ``TYPE_CHECKING``, ``__name__ == "__main__"``, and the platform predicates that engines use:
``is_hip()``, ``_is_cuda``, ``current_platform.is_rocm()``, ``torch.version.hip is not None``, … Everything else is
undecided, and undecided code counts as reachable.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Literal

Platform = Literal["cuda", "rocm", "cpu"]
PLATFORMS: tuple[Platform, ...] = ("cuda", "rocm", "cpu")

_PREDICATES: dict[str, tuple[Platform, ...]] = {
    **dict.fromkeys(("is_hip", "is_rocm", "is_amd"), ("rocm",)),
    **dict.fromkeys(("is_cuda", "is_nvidia"), ("cuda",)),
    **dict.fromkeys(("is_cuda_alike", "is_gpu"), ("cuda", "rocm")),
    "is_cpu": ("cpu",),
    **dict.fromkeys(("is_npu", "is_xpu", "is_hpu", "is_tpu", "is_mps", "is_musa", "is_out_of_tree"), ()),
}
"""Name of a predicate (call, attribute or flag, leading underscores left out) → platforms on which it is true."""

_OTHER_SYSTEMS = ("darwin", "win32", "cygwin", "nt")


def truth(test: ast.expr, platform: Platform | None, flags: Mapping[str, bool] | None = None) -> bool | None:
    """Whether a condition holds on ``platform`` (None: no platform is assumed); None where that can't be told.

    ``flags`` are names of the file whose truth is known (``_use_aiter = … and _is_hip``).
    """
    flags = flags or {}
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = truth(test.operand, platform, flags)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        return _of_operands(test, platform, flags)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _of_comparison(test, platform, flags)
    return _of_name(test, platform, flags)


def _of_operands(test: ast.BoolOp, platform: Platform | None, flags: Mapping[str, bool]) -> bool | None:
    values = [truth(value, platform, flags) for value in test.values]
    deciding = isinstance(test.op, ast.Or)  # one true operand decides an or, one false operand an and
    if deciding in values:
        return deciding
    return None if None in values else not deciding


def _of_comparison(test: ast.Compare, platform: Platform | None, flags: Mapping[str, bool]) -> bool | None:
    left, operator, right = test.left, test.ops[0], test.comparators[0]
    if isinstance(right, ast.Constant) and right.value is None and isinstance(operator, ast.Is | ast.IsNot):
        known = _of_name(left, platform, flags)
        return None if known is None else known == isinstance(operator, ast.IsNot)
    if not (isinstance(operator, ast.Eq) and isinstance(right, ast.Constant)):
        return None
    if isinstance(left, ast.Name) and left.id == "__name__" and right.value == "__main__":
        return False
    if isinstance(left, ast.Attribute) and left.attr in ("platform", "name") and right.value in _OTHER_SYSTEMS:
        return False
    return None


def _of_name(test: ast.expr, platform: Platform | None, flags: Mapping[str, bool]) -> bool | None:
    """Of a call without arguments, an attribute or a name."""
    node = test.func if isinstance(test, ast.Call) and not test.args and not test.keywords else test
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
    if name is None:
        return None
    if name == "TYPE_CHECKING":
        return False
    if isinstance(node, ast.Name) and name in flags:
        return flags[name]
    if platform is None:
        return None
    if isinstance(node, ast.Attribute) and _is_version(node):
        return platform == {"hip": "rocm", "cuda": "cuda"}.get(name)
    where = _PREDICATES.get(name.lstrip("_").lower())
    return None if where is None else platform in where


def _is_version(node: ast.Attribute) -> bool:
    return node.attr in ("hip", "cuda") and isinstance(node.value, ast.Attribute) and node.value.attr == "version"


def terminates(statement: ast.stmt, platform: Platform | None, flags: Mapping[str, bool] | None = None) -> bool:
    """Whether what follows the statement in its block is never reached."""
    if isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break):
        return True
    if isinstance(statement, ast.If):
        known = truth(statement.test, platform, flags)
        body, orelse = (_ends(block, platform, flags) for block in (statement.body, statement.orelse))
        return body if known is True else orelse if known is False else body and orelse
    if isinstance(statement, ast.With | ast.AsyncWith):
        return _ends(statement.body, platform, flags) and not any(
            isinstance(node, ast.Raise) for inner in statement.body for node in ast.walk(inner)
        )
    return False


def _ends(block: Sequence[ast.stmt], platform: Platform | None, flags: Mapping[str, bool] | None) -> bool:
    return any(terminates(statement, platform, flags) for statement in block)


def module_flags(module: ast.Module, platform: Platform | None) -> dict[str, bool]:
    """Names that the module assigns once, on its top level, to a value whose truth is known."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(node.value)
    flags: dict[str, bool] = {}
    for statement in module.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            # A constant is a default that other code may change by ``global`` or from outside; a predicate is not.
            if isinstance(target, ast.Name) and len(assigned[target.id]) == 1:
                known = None if isinstance(statement.value, ast.Constant) else truth(statement.value, platform, flags)
                if known is not None:
                    flags[target.id] = known
    return flags
