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
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "alias",
            "base_url": f"{sys.argv[1]}/v1/completions",
            "tokenizer": sys.argv[2],
            "tokenizer_backend": "huggingface",
            "max_length": 1024,
            "max_retries": 1,
        },
        tasks=[task],
        bootstrap_iters=0,
    )
samples = found["samples"]["cases"]
likelihoods = [float(answer[0]) for sample in samples for answer in sample["filtered_resps"]]
assert len(likelihoods) == 4 and all(value < 0.0 for value in likelihoods), likelihoods
assert found["results"]["cases"]["acc,none"] == 1.0, likelihoods
print("done loglikelihood")
