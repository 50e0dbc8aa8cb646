"""Expert maps that a dummy start zeroed, on two GPUs: wrong without the registry's entry, right with it.

    python -m benchmarks.expert_parallel_gpu [--gpus 2]

Expert parallelism can't run on a CPU. A vLLM over two GPUs (tensor parallel 2, expert parallel 2) loads a random
Qwen3-MoE from disk; its greedy tokens are the truth. Then the integer maps of global to local experts are zeroed on
every rank, as an engine that starts with dummy weights does on ROCm, and the same weights are loaded again through the
engine's own layer-wise reload: once as they are, once after the registry's ``moe_expert_map`` was refreshed. JSON on
stdout: equal greedy tokens of each, and what the entry says that it repaired. Exits 1 unless the first differs and the
second is equal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FIELDS: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
    "vocab_size": 4096, "max_position_embeddings": 512, "norm_topk_prob": True, "initializer_range": 0.06,
}  # fmt: skip


class WorkerExtension:
    """Methods that vLLM adds to each of its workers (``worker_extension_cls``), for ``LLM.collective_rpc``."""

    model_runner: Any
    vllm_config: Any

    def zero_maps(self) -> int:
        """Zero the expert maps and masks of every MoE layer; how many there were."""
        count = 0
        for module in self.model_runner.get_model().modules():
            manager = getattr(module, "expert_map_manager", None)
            if manager is None:
                continue
            held = (module, "_expert_map"), (module, "expert_mask"), (manager, "_expert_map"), (manager, "_expert_mask")
            seen: dict[int, Any] = {}
            for owner, name in held:
                tensor = getattr(owner, name, None)
                if tensor is not None:
                    seen[tensor.data_ptr()] = tensor
            for tensor in seen.values():
                tensor.zero_()
            count += len(seen)
        return count

    def refresh_maps(self) -> list[str]:
        """Run what the registry does before the loader is asked."""
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]

        from lockstep.refit.derived_vllm import registry

        with set_current_vllm_config(self.vllm_config):
            reports = registry().before_plan(self.model_runner.get_model())
        return [f"{one.entry}: {one.num_changed} of {one.num_states} changed {one.detail}" for one in reports]

    def reload(self, folder: str) -> None:
        """The engine's own layer-wise reload of a folder's weights."""
        import torch
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]

        from lockstep.rollout.vllm_reload import LayerwiseReload

        layers, model = LayerwiseReload(), self.model_runner.get_model()
        tensors = load_file(Path(folder) / "model.safetensors")
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            layers.initialize(model)
            model.load_weights(iter(tensors.items()))
            layers.finalize(model, self.vllm_config.model_config)
        torch.cuda.synchronize()


def write_checkpoint(folder: Path) -> None:
    """A random Qwen3-MoE under published names."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lockstep.model.weights import ModelWeights
    from lockstep.refit.check import _folder

    torch.manual_seed(1)
    config = AutoConfig.for_model("qwen3_moe", **FIELDS)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    _folder(model, ModelWeights(model, version=1), folder)


def greedy(llm: Any) -> list[list[int]]:
    """Greedy tokens of eight fixed random prompts."""
    import numpy as np
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    llm.reset_prefix_cache()
    generator = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": generator.integers(10, 4096, 24).tolist()} for _ in range(8)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def num_equal(one: list[list[int]], other: list[list[int]]) -> int:
    """Equal tokens at equal places."""
    return sum(a == b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def measure(gpus: int) -> dict[str, Any]:
    """The engine as it loads, after a reload with zeroed maps, and after one with refreshed maps."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        llm = LLM(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", tensor_parallel_size=gpus,
            enable_expert_parallel=True, enforce_eager=True, max_model_len=256, max_num_seqs=8,
            kv_cache_memory_bytes=256 << 20, worker_extension_cls="benchmarks.expert_parallel_gpu.WorkerExtension",
        )  # fmt: skip
        truth = greedy(llm)
        again = greedy(llm)
        llm.collective_rpc("reload", args=(folder,))
        reloaded = greedy(llm)
        zeroed = llm.collective_rpc("zero_maps")
        llm.collective_rpc("reload", args=(folder,))
        broken = greedy(llm)
        reports = llm.collective_rpc("refresh_maps")
        llm.collective_rpc("reload", args=(folder,))
        mended = greedy(llm)
        second = llm.collective_rpc("refresh_maps")
    return {
        "benchmark": "expert_parallel_gpu",
        "gpus": gpus,
        "tokens": sum(map(len, truth)),
        "maps_zeroed_by_rank": zeroed,
        "equal": {
            "the same engine asked twice": num_equal(truth, again),
            "reloaded with its maps": num_equal(truth, reloaded),
            "reloaded with zeroed maps": num_equal(truth, broken),
            "maps refreshed, reloaded": num_equal(truth, mended),
        },
        "repaired_by_rank": reports,
        "refreshed_again_by_rank": second,
    }


def main() -> None:
    """Print the JSON; exit 1 unless the fault shows and the entry mends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    result = measure(options.gpus)
    print(json.dumps(result, indent=1))
    equal, tokens = result["equal"], result["tokens"]
    if equal["reloaded with zeroed maps"] == tokens or equal["maps refreshed, reloaded"] != tokens:
        sys.exit("the fault does not show, or the entry does not mend it")


if __name__ == "__main__":
    main()
