"""vLLM alone, for `bench.rollout`: its `reload_weights` from memory, and its `generate`. Runs in its own process.

Settings: `model`, the content of a config.json. A question with `prompts`, `samples` and `tokens` causes completions of so many tokens, another
one a reload. An answer has `seconds`.
"""

from __future__ import annotations

import os
from typing import Any

from bench.peers import Turns

TURNS = Turns()

import json  # noqa: E402 (stdout is moved first)
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    settings = TURNS.next()
    from vllm import LLM, SamplingParams

    fields: dict[str, Any] = dict(settings["model"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with TemporaryDirectory() as name:
        config.save_pretrained(name)
        given = json.loads((Path(name) / "config.json").read_text())
        given["architectures"] = [type(model).__name__]
        (Path(name) / "config.json").write_text(json.dumps(given))
        engine = LLM(
            name,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
        )
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    TURNS.answer()
    while True:
        question = TURNS.next()
        start = time.perf_counter()
        if "prompts" in question:
            params = SamplingParams(
                n=question["samples"],
                max_tokens=question["tokens"],
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
            )
            prompts: Any = [{"prompt_token_ids": ids} for ids in question["prompts"]]
            engine.generate(prompts, params, use_tqdm=False)
        else:
            again = {"weights_iterator": iter(weights.items())}
            engine.collective_rpc("reload_weights", kwargs=again)
        TURNS.answer(seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main()
