"""Flips bits in what an engine has on disk, its sessions and KV blocks, or cuts it: answers stay as they were, and what
is lost is said in words.
"""

from __future__ import annotations

import random
import traceback
from pathlib import Path
from typing import Any

from pagemill import LLM, SamplingParams
from pagemill.errors import PagemillError

MODEL = "smollm2-135m"
PROMPT = "The history of bread begins with " * 20
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "Name a color."}]


def failures(folder: Path, rounds: int, seed: int) -> list[str]:
    """Answers, damages and answers again so many times. Returns what must not be so."""
    chance, failed = random.Random(seed), []
    settings = {"session_path": folder / "sessions", "kv_disk_path": folder / "kv", "kv_disk_memory": "64MiB"}
    settings |= {"max_model_len": 512, "kv_memory": "64MiB"}
    with LLM(MODEL, **settings) as llm:
        expected = _answer(llm)
        llm.session("talk").chat(MESSAGES, PARAMS)
    for number in range(rounds):
        where = f"round {number}, {_damage(folder, chance)}"
        try:
            with LLM(MODEL, **settings) as llm:
                if (found := _answer(llm)) != expected:
                    failed.append(f"{where}: {found!r} instead of {expected!r}")
                for name in ("talk", f"new {number}"):
                    failed += _wordless(where, llm, name)
        except PagemillError as error:
            failed += [f"{where}: it ended without words"] * (not error.message)
        except Exception:
            failed.append(f"{where}: {traceback.format_exc()[-1500:]}")
    return failed


def _answer(llm: LLM) -> Any:
    (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    return output.outputs[0].error or output.outputs[0].text


def _wordless(where: str, llm: LLM, name: str) -> list[str]:
    """Goes on with a session. Returns a refusal that says nothing."""
    try:
        llm.session(name).chat(MESSAGES, PARAMS)
    except PagemillError as error:
        return [f"{where}: {type(error).__name__} for {name!r} without words"] * (not error.message)
    return []


def _damage(folder: Path, chance: random.Random) -> str:
    """Changes one file, and says what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = chance.choice(files)
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    if chance.random() < 0.3:
        del data[at:]
        what = f"cut at {at}"
    else:
        data[at] ^= 1 << chance.randrange(8)
        what = f"flipped a bit of byte {at}"
    path.write_bytes(data)
    return f"{path.name} {what}"
