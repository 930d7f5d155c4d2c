"""Train the built-in demo model: a small Llama that has read Python's standard library.

The text is what every Python installation carries: docstrings become questions and answers ("What does os.path.join
do?"), sources become plain text and "show me the source" answers. A little small talk lets a greeting work.

    python -m deploy.train_demo --minutes 40

The order of the data depends on the seed alone. An interrupted run goes on from its checkpoint.
"""

import argparse
import codecs
import contextlib
import importlib
import inspect
import io
import json
import math
import random
import re
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
BOS, EOS, USER, ASSISTANT, SYSTEM, END = range(len(SPECIAL_TOKENS))
IGNORED = -100  # the label that the loss skips
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('The roles are system, user and assistant, not ' + message['role']) -}}
    {%- endif -%}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""

CORE_MODULES = (
    "builtins os.path json re math random itertools functools collections textwrap datetime time pathlib shutil "
    "copy heapq bisect statistics string glob"
)
OTHER_MODULES = (
    "os sys subprocess threading asyncio logging base64 hashlib csv tempfile pickle struct operator contextlib "
    "dataclasses enum typing urllib.parse socket queue zlib gzip argparse decimal fractions io uuid secrets platform "
    "weakref abc fnmatch traceback warnings difflib html pprint timeit zipfile hmac shlex getpass calendar"
)
WITH_METHODS = {"builtins", "collections", "datetime", "pathlib", "re", "threading"}
NOT_PROSE = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages", "pydoc_data"}

BRIEF = ["What does {} do?", "What is {}?", "Explain {}.", "Tell me about {}.", "What does `{}` do?", "Describe {}."]
USAGE = ["How do I use {}?", "How do I call {}?", "What is the signature of {}?", "Show me how to use {}."]
FULL = ["Explain {} in detail.", "Tell me everything about {}.", "Show the documentation of {}."]
SOURCE = ["Show the source of {}.", "Show me the code of {}.", "How is {} implemented?", "Write {}."]
SYSTEM_PROMPTS = ["You are a helpful assistant.", "You are a concise assistant.", "You are the Squadron demo model."]
SYSTEM_PROMPTS += ["Answer questions about Python's standard library."]
MODEL_FOLDER = Path(__file__).parent / "demo_model"


@dataclass(frozen=True)
class Exchange:
    """One answer and the ways to ask for it; shown `weight` times an epoch."""

    questions: list[str]
    answer: str
    weight: int = 1


def paragraphs(doc: str, limit: int) -> str:
    """The first paragraphs of a docstring, at least one, up to `limit` characters; running text is unwrapped."""
    kept: list[str] = []
    for block in re.split(r"\n\s*\n", doc.strip()):
        is_prose = not re.search(r"^(\s|>>>|[-*] )|->|\.\.\. ", block, re.MULTILINE)
        text = " ".join(block.split()) if is_prose else block
        if kept and len("\n\n".join([*kept, text])) > limit:
            break
        kept.append(text)
    text = "\n\n".join(kept)
    cut = max(text.rfind(". ", 0, limit), text.rfind("\n", 0, limit)) + 1 if len(text) > limit else 0
    return text[:cut] if cut else text


def documented(modules: list[str]) -> Iterator[tuple[str, Any]]:
    """Dotted names and objects: the modules, their public members, and the methods of the best known classes."""
    for module_name in modules:
        module = importlib.import_module(module_name)
        yield module_name, module
        prefix = "" if module_name == "builtins" else module_name + "."
        own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", None) == module_name]
        for name in sorted(getattr(module, "__all__", own)):
            member = getattr(module, name, None)
            if name[0] == "_" or not (inspect.isroutine(member) or inspect.isclass(member)):
                continue
            yield prefix + name, member
            if inspect.isclass(member) and module_name in WITH_METHODS and not issubclass(member, BaseException):
                methods = {n: getattr(member, n, None) for n in sorted(vars(member)) if n[0] != "_"}
                yield from ((f"{prefix}{name}.{n}", method) for n, method in methods.items() if callable(method))


def explain(name: str, thing: Any, weight: int) -> Iterator[Exchange]:
    """Everything that can be asked about one object of the standard library."""
    doc = inspect.getdoc(thing)
    if not doc or (inspect.isclass(thing) and doc == inspect.getdoc(thing.__base__)):
        return
    brief, full = paragraphs(doc, 320), paragraphs(doc, 1500)
    about = [f"What is the {name} module?"] if inspect.ismodule(thing) else []
    yield Exchange([q.format(name) for q in BRIEF + (FULL if full == brief else [])] + about, brief, 2 * weight)
    if full != brief:
        yield Exchange([q.format(name) for q in FULL], full, weight)
    with contextlib.suppress(ValueError, TypeError):  # no signature is known
        signature = f"{name}{inspect.signature(thing)}" if inspect.isroutine(thing) else ""
        if signature and " at 0x" not in signature and len(signature) < 200:
            yield Exchange([q.format(name) for q in USAGE], f"{signature}\n\n{brief}", weight)
    with contextlib.suppress(OSError, TypeError):  # no source is at hand
        source = inspect.getsource(thing) if inspect.isfunction(thing) and "." not in thing.__qualname__ else ""
        if source and len(source) < 1400:
            yield Exchange([q.format(name) for q in SOURCE], source.strip(), weight)


def conversations() -> list[Exchange]:
    """All questions and answers: small talk, the best known modules twice, the other modules."""
    core = [item for name, thing in documented(CORE_MODULES.split()) for item in explain(name, thing, 2)]
    other = [item for name, thing in documented(OTHER_MODULES.split()) for item in explain(name, thing, 1)]
    with contextlib.redirect_stdout(io.StringIO()):
        zen = codecs.decode(importlib.import_module("this").s, "rot13")
    talk = [Exchange(**item, weight=12) for item in json.loads((MODEL_FOLDER / "small_talk.json").read_text())]
    talk.append(Exchange(["What is the Zen of Python?", "Show the Zen of Python.", "import this"], zen, 12))
    return [*talk, *core, *other]


def plain_text(seed: int, characters: int = 1600) -> list[str]:
    """The standard library's sources, cut into pieces at line ends, in a seeded order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[str] = []
    for path in sorted(root.rglob("*.py")):
        if not NOT_PROSE & set(path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            pieces += re.findall(rf"(?s).{{200,{characters}}}(?:\n|\Z)", text)
    random.Random(seed).shuffle(pieces)
    return pieces


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE; the special tokens come first, in the order of SPECIAL_TOKENS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"special_tokens": SPECIAL_TOKENS, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    return tokenizer


def encode_exchange(tokenizer: Tokenizer, exchange: Exchange, rng: random.Random) -> tuple[list[int], list[int]]:
    """Token ids and labels of one turn of a conversation; only the answer is learnt."""
    question = rng.choice(exchange.questions)
    if rng.random() < 0.1:
        question = question.lower().rstrip("?!.")
    prompt = [USER, *tokenizer.encode(question, add_special_tokens=False).ids, END, ASSISTANT]
    answer = [*tokenizer.encode(exchange.answer, add_special_tokens=False).ids, END]
    return prompt + answer, [IGNORED] * len(prompt) + answer


def token_stream(tokenizer: Tokenizer, seed: int, plain_share: float) -> Iterator[tuple[int, int]]:
    """Endless tokens and labels: shuffled epochs of conversations of a few turns, with plain text between them."""
    exchanges = [exchange for exchange in conversations() for _ in range(exchange.weight)]
    pieces = cycle(plain_text(seed))
    rng = random.Random(seed)
    plain, total, turns_left = 0, 0, 0
    while True:
        rng.shuffle(exchanges)
        for exchange in exchanges:
            ids, labels = encode_exchange(tokenizer, exchange, rng)
            if turns_left == 0:
                if plain < plain_share * total:
                    piece = [BOS, *tokenizer.encode(next(pieces), add_special_tokens=False).ids, EOS]
                    plain, total = plain + len(piece), total + len(piece)
                    yield from zip(piece, piece, strict=True)
                turns_left = rng.choice([1, 1, 1, 2, 3])
                system = tokenizer.encode(rng.choice(SYSTEM_PROMPTS), add_special_tokens=False).ids
                head = [BOS, SYSTEM, *system, END] if rng.random() < 0.2 else [BOS]
                ids, labels = head + ids, [IGNORED] * len(head) + labels
            turns_left -= 1
            total += len(ids)
            yield from zip(ids, labels, strict=True)


def model_config(vocab_size: int) -> LlamaConfig:
    """About 4.5 million parameters, under 10 MB in bfloat16; 4 kv heads let tensor parallel degrees 2 and 4 work."""
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 5, "head_dim": 32}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    ends = {"bos_token_id": BOS, "eos_token_id": [END, EOS], "pad_token_id": EOS}
    return LlamaConfig(vocab_size=vocab_size, tie_word_embeddings=True, **shape, **heads, **ends)


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model folder; each file is replaced whole, so that a reader never sees half of one."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[END],
        pad_token=SPECIAL_TOKENS[EOS],
        additional_special_tokens=SPECIAL_TOKENS[USER:END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    half = LlamaForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=[END, EOS], pad_token_id=EOS)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        half.save_pretrained(folder)
        half.config.dtype = torch.float32  # bfloat16 only saves space: greedy text should not hang on its rounding
        half.config.save_pretrained(folder)
        fast.save_pretrained(folder)
        for path in Path(folder).iterdir():
            path.chmod(0o644)
            path.replace(out / path.name)
    print(f"exported to {out}", flush=True)


def train(args: argparse.Namespace) -> None:
    """Train until the minutes are used up, with a checkpoint every two minutes and an export now and then."""
    torch.manual_seed(args.seed)
    state = torch.load(args.checkpoint, weights_only=True) if args.checkpoint.exists() else None
    texts = chain((f"{e.questions[0]}\n{e.answer}" for e in conversations()), plain_text(args.seed)[:1500])
    tokenizer = Tokenizer.from_str(state["tokenizer"]) if state else train_tokenizer(texts, args.vocab_size)
    model = LlamaForCausalLM(model_config(args.vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    step, elapsed, smooth_loss = 0, 0.0, math.log(args.vocab_size)
    stream, batch = token_stream(tokenizer, args.seed, args.plain_share), args.rows * args.row_tokens
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, elapsed, smooth_loss = state["step"], state["elapsed"], state["loss"]
        next(islice(stream, step * batch - 1, None))  # the stream has no random access
    saved, exported, started = elapsed, elapsed, time.monotonic() - elapsed
    while elapsed < 60 * args.minutes:
        ids, labels = torch.tensor(list(islice(stream, batch))).T.reshape(2, args.rows, args.row_tokens)
        cosine = 0.5 + 0.5 * math.cos(math.pi * elapsed / (60 * args.minutes))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 100) * (0.01 + 0.99 * cosine)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, elapsed = step + 1, time.monotonic() - started
        smooth_loss += (loss.item() - smooth_loss) * max(0.02, 1 / step)
        if step % 20 == 0:
            print(
                f"step {step}  {step * batch / 1e6:.2f}M tokens  {elapsed / 60:.1f} min  loss {smooth_loss:.3f}",
                flush=True,
            )
        if elapsed - saved > 120:
            saved = elapsed
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            state |= {"elapsed": elapsed, "loss": smooth_loss, "tokenizer": tokenizer.to_str()}
            torch.save(state, args.checkpoint.with_suffix(".new"))
            args.checkpoint.with_suffix(".new").replace(args.checkpoint)
        if elapsed - exported > 60 * args.export_minutes:
            exported = elapsed
            export(model, tokenizer, args.out)
    export(model, tokenizer, args.out)
    args.checkpoint.unlink(missing_ok=True)


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER, help="model folder to write")
    parser.add_argument("--minutes", type=float, default=40, help="training time, over all resumed runs")
    parser.add_argument("--export-minutes", type=float, default=10, help="time between exports")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and of the first weights")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4, help="sequences a step")
    parser.add_argument("--row-tokens", type=int, default=512, help="tokens a sequence")
    parser.add_argument("--plain-share", type=float, default=0.15, help="share of plain source text in the tokens")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "squadron-train-demo.pt")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
