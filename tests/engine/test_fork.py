"""A process with an engine may fork: the room that its KV pool may grow into counts for nothing."""

import subprocess
import sys

SCRIPT = """
import os
from pagemill import LLM, SamplingParams

llm = LLM("smollm2-135m", kv_memory="1MiB", max_model_len=16)
child = os.fork()
if not child:
    os._exit(0)
assert os.waitpid(child, 0) == (child, 0)
params = SamplingParams(max_tokens=4, temperature=0)
texts = set()
for kv_memory in ("1MiB", "16MiB", "1MiB"):
    llm.resize_kv_memory(kv_memory)
    texts.add(llm.generate("Once upon", params)[0].outputs[0].text)
print(len(texts))
"""


def test_a_process_with_an_engine_forks_and_its_pool_still_grows_and_shrinks():
    """Before, the system refused with ENOMEM: it counted all of the machine's memory as used by the parent."""
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr
