"""Shows where the time of a decode step goes: the model, the sampler, and the engine's own Python around them.

    python benchmarks/engine_overhead.py [--model smollm2-135m] [--dtype bfloat16] [--json]

For each number of running sequences, decode steps of the real model are timed by part, medians over the steps.
"engine" is all that is neither the model's forward pass nor the sampler: scheduling, memory, table edits, batch arrays,
outputs. Where the decoder runs as one call, a second table gives the model's time by operator.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import time
from collections import defaultdict
from statistics import median

from pagemill.config import EngineConfig
from pagemill.doctor import cpu_model
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.models.cpu_decoder import CpuDecoder
from pagemill.sampling.params import SamplingParams

PROMPT_LEN = 64
STEPS = 40


def timed(owner, name, part, spent):
    """Replaces a method by one that adds its time to `spent[part]`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def run(*args, **kwargs):
        begin = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - begin

    setattr(owner, name, run)


def measure(core: EngineCore, spent, running: int) -> dict[str, float]:
    for i in range(running):
        prompt = [(7 * i + 3 * j) % 40000 + 100 for j in range(PROMPT_LEN)]
        params = SamplingParams(temperature=0.0, max_tokens=STEPS + 20, ignore_eos=True)
        core.add_request(
            EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params, arrival_s=time.monotonic())
        )
    while core.stats().waiting or core.stats().generated_tokens < 3 * running + measure.before:
        core.step()
    parts = defaultdict(list)
    decoder = core.executor.decoder
    for _ in range(STEPS - 10):
        spent.clear()
        before = decoder.operator_seconds() if isinstance(decoder, CpuDecoder) else {}
        begin = time.perf_counter()
        core.step()
        total = time.perf_counter() - begin
        spent["model"] = spent["forward"] + spent["head"]
        for operator in before:
            parts[operator].append(decoder.operator_seconds()[operator] - before[operator])
        parts["head"].append(spent.pop("head"))
        parts["forward"].append(spent.pop("forward"))
        for part in ("model", "sampler", "schedule", "apply", "commit"):
            parts[part].append(spent[part])
        parts["other"].append(total - sum(spent.values()))
        parts["step"].append(total)
    core.close()
    measure.before = core.stats().generated_tokens
    result = {part: 1e3 * median(times) for part, times in parts.items()}
    result["engine"] = result["step"] - result["model"] - result["sampler"]
    result["share"] = result["engine"] / result["step"]
    return result


measure.before = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", choices=["gguf", "int8"])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    settings = {"dtype": args.dtype, "max_num_seqs": max(args.running), "max_model_len": 512}
    core = EngineCore(
        EngineConfig(model=args.model, quantization=args.quantization, speculative_config="off", **settings)
    )
    spent: dict[str, float] = defaultdict(float)
    decoder = core.executor.decoder
    timed(decoder, "forward", "forward", spent)
    timed(decoder, "logits", "head", spent)
    timed(decoder, "argmax", "head", spent)
    timed(core.executor.sampler, "sample", "sampler", spent)
    timed(core.scheduler, "schedule", "schedule", spent)
    timed(core.scheduler, "commit", "commit", spent)
    timed(core.executor, "apply", "apply", spent)
    rows = {running: measure(core, spent, running) for running in args.running}
    if args.json:
        about = {"cpu": cpu_model(), "python": platform.python_version()}
        print(json.dumps({**about, "milliseconds": rows}, indent=2))
        return
    columns = ["step", "model", "sampler", "schedule", "apply", "commit", "other", "engine"]
    print(f"{cpu_model()}, {core.ready.description}")
    print("milliseconds per decode step, medians")
    print(f"{'running':>8}" + "".join(f"{c:>10}" for c in columns) + f"{'share':>9}")
    for running, row in rows.items():
        print(f"{running:>8}" + "".join(f"{row[c]:>10.3f}" for c in columns) + f"{row['share']:>9.1%}")
    if isinstance(decoder, CpuDecoder):
        columns = [*decoder.operator_seconds(), "head", "forward"]
        print("milliseconds by operator")
        print(f"{'running':>8}" + "".join(f"{c:>11}" for c in columns))
        for running, row in rows.items():
            print(f"{running:>8}" + "".join(f"{row[c]:>11.3f}" for c in columns))


if __name__ == "__main__":
    main()
