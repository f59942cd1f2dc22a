"""lm-eval's tasks of likelihoods through its `local-completions`: python lm_eval_client.py URL TOKENIZER."""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval

CASES = [
    {"query": "def read(self, path):\n    return ", "choices": ["open(path).read()", "zebra umbrella"], "gold": 0},
    {"query": "for i in range(10):\n    print(", "choices": [" the of a", "i)"], "gold": 1},
]
with tempfile.TemporaryDirectory() as folder:
    data = Path(folder, "cases.json")
    data.write_text("\n".join(map(json.dumps, CASES)))
    task = {
        "task": "cases",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": folder},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    likelihoods = {}
    for backend in ("huggingface", "remote"):  # a tokenizer of its own, or /tokenizer_info, /tokenize and /detokenize
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "alias",
                "base_url": f"{sys.argv[1]}/v1/completions",
                "tokenizer": sys.argv[2] if backend == "huggingface" else None,
                "tokenizer_backend": backend,
                "max_length": 1024,
                "max_retries": 1,
            },
            tasks=[task],
            bootstrap_iters=0,
        )
        samples = found["samples"]["cases"]
        likelihoods[backend] = [float(answer[0]) for sample in samples for answer in sample["filtered_resps"]]
        assert found["results"]["cases"]["acc,none"] == 1.0, likelihoods
assert len(likelihoods["huggingface"]) == 4 and all(value < 0.0 for value in likelihoods["huggingface"]), likelihoods
print("done loglikelihood")
assert all(abs(a - b) < 1e-3 for a, b in zip(*likelihoods.values(), strict=True)), likelihoods
print("done remote")
