"""A worker that runs OpenVINO GenAI behind standard input and output, in that package's own
environment.

    python openvino_worker.py MODEL_FOLDER NUM_THREADS MAX_SEQUENCES

A line in: {"prompts": [[ids]], "num_output": N}. A line out: {"first_s", "end_s", "num_tokens"},
times by time.perf_counter, which all processes of a machine share.
"""

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai as genai


def make_pipeline(folder, num_threads, max_sequences):
    """Continuous batching with paged attention and prefix caching."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4  # GB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = max_sequences
    scheduler.max_num_batched_tokens = 512
    properties = {"INFERENCE_NUM_THREADS": num_threads}
    return genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)


def read_new(handles):
    """Tokens that came since the last call."""
    parts = [handle.read().values() for handle in handles if handle.can_read()]
    return sum(len(output.generated_ids) for part in parts for output in part)


def answer(pipeline, prompts, num_output, first_id):
    """Run all prompts at once, greedily."""
    config = genai.GenerationConfig()
    config.max_new_tokens = num_output
    config.ignore_eos = True
    config.do_sample = False
    handles = []
    for index, ids in enumerate(prompts):
        tensor = openvino.Tensor(np.array([ids], dtype=np.int64))
        handles.append(pipeline.add_request(first_id + index, tensor, config))
    first_s, num_tokens = None, 0
    while pipeline.has_non_finished_requests():
        pipeline.step()
        num_tokens += read_new(handles)
        if first_s is None and num_tokens:
            first_s = time.perf_counter()
    end_s = time.perf_counter()
    num_tokens += read_new(handles)
    return {"first_s": first_s or end_s, "end_s": end_s, "num_tokens": num_tokens}


def main():
    folder, num_threads, max_sequences = sys.argv[1:]
    pipeline = make_pipeline(folder, int(num_threads), int(max_sequences))
    count = 0
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(answer(pipeline, job["prompts"], job["num_output"], count)), flush=True)
        count += len(job["prompts"])


if __name__ == "__main__":
    main()
