"""A run whose engine is quantised: it trains, its receipts say what was checked, and its gate has its own bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config.errors import ConfigError
from lockstep.loop import train
from lockstep.metrics.sinks import read_jsonl
from lockstep.recipes import load_recipe
from tests.e2e.conftest import SMALL

SCHEMES = ("fp8", "fp8_ue8m0", "mxfp4_experts")


def test_a_recipe_without_a_bound_for_the_scheme_is_refused() -> None:
    refusal = r"(?s)no bound for cpu .* quantised fp8; given: .* add one with its evidence"
    with pytest.raises(ConfigError, match=refusal):
        load_recipe("tiny-deepseek-v4", ["rollout.quantisation=fp8", "device=cpu"])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_run_trains_within_its_bound(scheme: str, tmp_path: Path) -> None:
    resolved = load_recipe("tiny-qwen3-moe", [*SMALL, "device=cpu", f"rollout.quantisation={scheme}"])
    assert train(resolved, tmp_path / "run") == 0
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "verdict/status" in row]
    assert len(rows) == 6
    assert {row["verdict/status"] for row in rows} == {"pass"}
    mismatch = [float(str(row["agreement/abs_diff/mean"])) for row in rows]
    assert min(mismatch) > 1e-4, "an unquantised engine is nearer than 1e-6"
    for receipt in read_jsonl(tmp_path / "run" / "refits.jsonl"):
        claims = {claim["name"]: claim for claim in receipt["claims"]}  # pyright: ignore
        assert claims["loaded"]["status"] in ("held", "not checked")
    first = read_jsonl(tmp_path / "run" / "refits.jsonl")[0]
    details = {claim["name"]: claim for claim in first["claims"]}  # pyright: ignore
    assert details["loaded"]["status"] == details["covered"]["status"] == "held"
    assert "block scales" in details["covered"]["detail"]
