"""lm-eval over completions and chats, with tasks and data of its own and the server's tokenizer."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

_ALWAYS = "dataset_path: json\ndataset_kwargs: {{data_files: {data}}}\ntest_split: train\ntask: {name}\n"
TASKS = {
    "sums_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "sums_text": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 16}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "sums_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{answer}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
""",
}


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        data = folder / "sums.jsonl"
        data.write_text("".join(json.dumps(_document(number)) + "\n" for number in range(20, 26)))
        for name, task in TASKS.items():
            (folder / f"{name}.yaml").write_text(_ALWAYS.format(data=data, name=name) + task)
        manager = TaskManager(include_path=directory)
        common = "model=tiny-chat,num_concurrent=2,max_length=1024"

        def evaluate(model: str, path: str, tasks: list[str], **options: Any) -> dict[str, Any]:
            arguments = f"{common},base_url={url}/v1/{path}"
            found: Any = lm_eval.simple_evaluate(
                model, model_args=arguments, tasks=tasks, task_manager=manager, **options
            )
            results: dict[str, Any] = found["results"]
            return results

        results = evaluate("local-completions", "completions", [*TASKS])
        print("run", results["sums_choice"]["acc,none"])
        print("run", results["sums_rolling"]["bits_per_byte,none"] > 0)
        results = evaluate(
            "local-chat-completions", "chat/completions", ["sums_text"], apply_chat_template=True
        )
        print("run", results["sums_text"]["exact_match,none"])


def _document(number: int) -> dict[str, Any]:
    answer = f"{number} + 22 = {number + 22}"
    choices = [f" {answer}", " The weather is nice."]
    return {"question": f"What is {number} + 22?", "choices": choices, "label": 0, "answer": answer}


if __name__ == "__main__":
    main(sys.argv[1])
