"""vLLM's part in `benchmarks.search`, run by an interpreter that has vLLM but not this package.

Its one argument describes the work in JSON. For each line on standard input it samples all
responses once and prints `spent`, the seconds by the clock and the processor's.
"""

import json
import sys
import time

from vllm import LLM, SamplingParams


def main() -> None:
    """Load the model, then take turns."""
    task = json.loads(sys.argv[1])
    llm = LLM(
        task["folder"],
        dtype=task["precision"],
        enforce_eager=not task["compiled"],
        max_model_len=512,
        skip_tokenizer_init=True,
        seed=0,
    )
    prompts, options = [], []
    for prompt, lengths in zip(task["prompts"], task["lengths"], strict=True):
        for length in lengths:
            prompts.append({"prompt_token_ids": prompt})
            options.append(
                SamplingParams(
                    temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False
                )
            )
    for _ in sys.stdin:
        llm.reset_prefix_cache()
        wall, cpu = time.perf_counter(), time.process_time()
        found = llm.generate(prompts, options, use_tqdm=False)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        lengths = [len(output.outputs[0].token_ids) for output in found]
        assert lengths == [length for row in task["lengths"] for length in row]
        print("spent", wall, cpu, flush=True)


if __name__ == "__main__":
    main()
