"""lm-eval: its model `local-completions` with the server's own tokenizer, and `local-chat-completions`.

The tasks are made here, of documents that nobody need download. The demo model knows them.
"""

import json
import math
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()

import requests
from checks import KEY, MODEL, QUESTION, URL, run
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

os.environ["OPENAI_API_KEY"] = KEY
FOLDER = Path(os.environ["HF_DATASETS_CACHE"])
HEADERS = {"Authorization": f"Bearer {KEY}"}
DOCUMENTS = [
    {"question": QUESTION, "answers": ["Join two or more pathname components", "zebra zebra"], "gold": 0},
    {"question": "What does len do?", "answers": ["qqq", "Return the number of items in a container."], "gold": 1},
    {"question": "What does sorted do?", "answers": ["Return a new list", "Xyz"], "gold": 0},
]
ANSWER = "{{answers[gold]}}"
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{answers}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "go_on": {
        "output_type": "generate_until",
        "doc_to_text": ANSWER,
        "doc_to_target": ANSWER,
        "generation_kwargs": {"until": ["zebra"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": ANSWER,
        "generation_kwargs": {"until": ["."], "max_gen_toks": 64},
        "metric_list": [{"metric": "exact_match"}],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": ANSWER,
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}
COMPLETIONS = ("local-completions", f"{URL}/completions")
CHAT = ("local-chat-completions", f"{URL}/chat/completions")


def evaluated(name, endpoint=COMPLETIONS, **settings):
    """Evaluate a task: its results, and what the model gave for each document."""
    path = FOLDER / f"{name}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
    model, url = endpoint
    arguments = {"model": MODEL, "base_url": url, "auth_token": KEY, "max_retries": 1, "max_length": 1024}
    found = simple_evaluate(
        model,
        arguments | settings,
        tasks=[{"task": name, **data, **TASKS[name]}],
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template=endpoint == CHAT,
        bootstrap_iters=0,
        cache_requests=False,
    )
    given = [sample["filtered_resps"] for sample in found["samples"][name]]
    assert len(given) == len(DOCUMENTS)
    return found["results"][name], given


def completion(**asked):
    answer = requests.post(f"{URL}/completions", json={"model": MODEL, **asked}, headers=HEADERS, timeout=60)
    answer.raise_for_status()
    return answer.json()["choices"][0]


def tokenizer():
    """The server tells that it has one, so none is downloaded."""
    model = LocalCompletionsAPI(base_url=f"{URL}/completions", model=MODEL, auth_token=KEY)
    assert model.tokenizer_backend == "remote"
    assert model.tokenizer.decode(model.tok_encode(QUESTION)) == QUESTION
    assert model.tokenizer.encode(model.eos_string) == [model.eot_token_id]


def generate():
    _, given = evaluated("go_on")
    for (text,), document in zip(given, DOCUMENTS, strict=True):
        begun = document["answers"][document["gold"]]
        assert text == completion(prompt=begun, add_special_tokens=False, max_tokens=16, temperature=0)["text"]
    assert any(text for (text,) in given)


def chat():
    results, given = evaluated("answer", CHAT)
    assert all(text for (text,) in given)
    assert "exact_match,none" in results


def loglikelihood():
    """Prompts with their answers come back (`echo`) with the logprob of each token; right answers are likelier."""
    results, given = evaluated("choice")
    assert results["acc,none"] == 1
    model = LocalCompletionsAPI(base_url=f"{URL}/completions", model=MODEL, auth_token=KEY)
    for found, document in zip(given, DOCUMENTS, strict=True):
        for (logprob, _), answer in zip(found, document["answers"], strict=True):
            prompt = model.tok_encode(f"{document['question']} {answer}")
            told = completion(prompt=prompt, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
            begin = len(model.tok_encode(document["question"]))
            wanted = sum(told[at][str(prompt[at])]["logprob"] for at in range(begin, len(prompt)))
            assert math.isclose(logprob, wanted, abs_tol=0.01), (logprob, wanted)


def greedy():
    """Whether an answer is what the model would have said is told by the likeliest token of each position."""
    model = LocalCompletionsAPI(base_url=f"{URL}/completions", model=MODEL, auth_token=KEY)
    begun = DOCUMENTS[0]["answers"][0]
    said = completion(prompt=begun, add_special_tokens=False, max_tokens=6, temperature=0)["text"]
    asked = [Instance("loglikelihood", {}, (begun, text), number) for number, text in enumerate((said, " zebra"))]
    assert [is_greedy for _, is_greedy in model.loglikelihood(asked)] == [True, False]


def batches():
    """Several requests at once, each with several prompts."""
    assert evaluated("choice", num_concurrent=3, batch_size=2)[1] == evaluated("choice")[1]
    assert evaluated("go_on", num_concurrent=3, batch_size=3)[1] == evaluated("go_on")[1]


def rolling():
    results, given = evaluated("text")
    assert all(logprob < 0 for (logprob,) in given)
    assert 1 < results["word_perplexity,none"] < math.inf


if __name__ == "__main__":
    run(tokenizer, generate, chat, loglikelihood, greedy, batches, rolling)
