"""Tasks: what a model is asked, and how its answers are scored.

A reward takes what TRL gives one: completions (strings, or lists of messages where the prompt is
one) and the rows' columns by name, each a list. It returns a float each, higher is better. Those
here never run what a model wrote, and take bounded time for any text.
"""
import ast
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import sys
import zlib
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Callable

class UserError(ValueError):
    """Bad input: one sentence that says where, what was found, and what to do."""

@dataclass(frozen=True)
class Task:
    name: str
    train: list[dict]  # row["prompt"] is a raw string or chat messages; other keys are columns
    heldout: list[dict]  # shares no prompt with train
    reward: Callable  # reward(completions, **columns) -> list[float]
    accuracy: Callable  # the same signature; 1.0 right, 0.0 wrong
    max_new_tokens: int
    stop: tuple[str, ...]  # a completion ends after the first of these strings
    defaults: dict  # es_llm settings that suit the task

def grade(fn: Callable, completions: list, *columns: list) -> list[float]:
    """[fn(text, value of each column)] over the rows; a list of messages counts by its last."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(fn(*row)) for row in zip(texts, *columns)]

# ---- Countdown: reach the target with every number once (arXiv 2509.24372, section 4.1). ---------
COUNTDOWN = """Combine the numbers {} into an expression that equals {}. Use every number exactly \
once, with + - * / and brackets as you like. Reason step by step inside <think> </think>, then \
write the expression alone inside <answer> </answer>, for example <answer>(5 + 3) * 2</answer>.
<think>"""
OPERATIONS = {ast.Add: Fraction.__add__, ast.Sub: Fraction.__sub__, ast.Mult: Fraction.__mul__,
              ast.Div: Fraction.__truediv__, ast.UAdd: Fraction.__pos__, ast.USub: Fraction.__neg__}
FULL_WIDTH = str.maketrans("０１２３４５６７８９（）＋－＊／＝×·÷−–", "0123456789()+-*/=**/--")
LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": "", "$": "",
         r"\(": "", r"\)": "", r"\dfrac": r"\frac", r"\frac{": "((", "}{": ")/(", "}": "))"}
INSIDE = r"((?:(?!</?(?:think|answer)>).)*)"  # up to the next tag: linear in the text

def number(value: Any) -> Fraction:
    """The exact number that an int, a float or a text like -12.5 is. ValueError for another."""
    text = str(value).strip()
    if not re.fullmatch(r"[-+]?[0-9]{1,30}(\.[0-9]{1,30})?", text):
        raise ValueError(f"{text[:40]!r} is no plain number")
    return Fraction(text)

def value_of(expression: str) -> tuple[Fraction, list[int]]:
    """Exact value and integers of an expression of + - * / and brackets, at most 200 characters:
    parsed, never run. ValueError or SyntaxError for anything else, such as a power."""
    if not re.fullmatch(r"[-+*/()0-9 ]{1,200}", expression):
        raise ValueError(f"{expression[:40]!r} is no short expression of integers")
    used = []

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant):
            used.append(node.value)
            return Fraction(node.value)
        apply = OPERATIONS.get(type(getattr(node, "op", None)))
        if apply is None:
            raise ValueError(f"{expression!r} is not plain arithmetic")
        return apply(*map(value, [node.operand] if isinstance(node, ast.UnaryOp)
                          else [node.left, node.right]))

    return value(ast.parse(expression.strip(), mode="eval").body), used

def solves(answer: str | None, numbers: list, target: Any) -> bool:
    """Whether `answer` uses each of `numbers` once and equals `target`. It may end in "= value"
    if that is true. A decimal target is a rounded one: within 1e-5, as in the paper."""
    if not answer or len(answer) > 200:
        return False
    if boxed := re.fullmatch(r"\\boxed\{(.*)\}", answer.strip(), re.DOTALL):
        answer = boxed[1]
    answer = answer.translate(FULL_WIDTH)
    for sign, plain in LATEX.items():
        answer = answer.replace(sign, plain)
    expression, *claims = answer.strip().rstrip(".").split("=")
    target, wanted = number(target), sorted(map(number, numbers))
    try:
        value, used = value_of(expression)
        results = [value, *map(number, claims)]
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    slack = 0 if target.denominator == 1 else 1e-5
    return len(claims) < 2 and sorted(used) == wanted and all(abs(r - target) <= slack
                                                              for r in results)

def answer_in(text: str) -> str | None:
    """Inside of the last complete <answer> </answer> after the reasoning."""
    found = re.findall(f"(?is)<answer>{INSIDE}</answer>", re.split("(?i)</think>", text)[-1])
    return found[-1] if found else None

def countdown_format(completions, **_) -> list[float]:
    """1 for "..</think> <answer>..</answer>", else 0.1 for a </think> plus 0.5 for an answer."""
    whole = re.compile(rf"(?is)(<think>)?{INSIDE}</think>\s*<answer>{INSIDE}</answer>\s*")
    return grade(lambda text: 1.0 if whole.fullmatch(text) else 0.1 * ("</think>" in text.lower())
                 + 0.5 * (answer_in(text) is not None), completions)

def countdown_accuracy(completions, numbers, target, **_) -> list[float]:
    """1 where the last answer is right."""
    return grade(lambda text, *row: solves(answer_in(text), *row), completions, numbers, target)

def countdown_reward(completions, numbers, target, **_) -> list[float]:
    """0.1 * format + accuracy, at most 1.1."""
    right = countdown_accuracy(completions, numbers, target)
    return [0.1 * f + a for f, a in zip(countdown_format(completions), right)]

def countdown_problems(rng: random.Random, count: int) -> list[dict]:
    """Problems of three or four numbers up to 99 with a whole target up to 999, no two the same."""
    problems = {}
    while len(problems) < count:
        numbers = [rng.randint(1, 99) for _ in range(rng.choice((3, 4)))]
        terms = [str(n) for n in numbers]
        while len(terms) > 1:
            left, right = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
            terms.append(f"({left} {rng.choice('+-*/')} {right})")
        try:
            target, _ = value_of(terms[0])
        except ZeroDivisionError:
            continue
        if target.denominator == 1 and 0 <= target <= 999:
            problems[(*sorted(numbers), target)] = dict(
                numbers=numbers, target=int(target), solution=terms[0][1:-1])
    return list(problems.values())

# ---- Toy: countdown for a model of one token a character, which is made here in half a minute. ---
def toy_reward(completions, numbers, target, **_) -> list[float]:
    """1 where the whole completion is an expression that is right."""
    return grade(solves, completions, numbers, target)
toy_accuracy = toy_reward

def toy_problems(heldout: bool) -> list[dict]:
    """Three digits, and a target that + - * between them reach. A quarter of all sets of digits
    and target is held out by a fixed rule, also from the model's warm-up."""
    rows = {}
    for a, b, c, p, q in itertools.product(*[range(1, 10)] * 3, "+-*", "+-*"):
        solution = f"{a}{p}{b}{q}{c}"
        target = int(value_of(solution)[0])
        key = f"{sorted((a, b, c))} {target}"
        if target >= 0 and (random.Random(key).random() < 0.25) == heldout:
            prompt = f"{a} {b} {c}={target}:"
            rows[prompt] = dict(prompt=prompt, numbers=[a, b, c], target=target, solution=solution)
    return random.Random(0).sample(list(rows.values()), len(rows))  # in no order

def tiny_model(steps: int = 1000) -> str:
    """Folder of a Llama of 0.14M parameters that knows more than it shows, made if not cached.

    It learns to solve toy problems; then, in the last fifth of the warm-up, seven answers of ten
    are a lazy a+b+c, whatever the target. Greedy decoding shows the habit, not the knowledge.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tqdm import tqdm
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "es_llm"
    folder = cache / f"tiny-{steps}-{zlib.crc32(Path(__file__).read_bytes()):08x}"
    if folder.is_dir():
        return str(folder)
    print("Warming up the tiny model: half a minute, this once.", flush=True)
    words = ["<pad>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **{
        f"{kind}_token": f"<{kind}>" for kind in ("pad", "eos", "unk")})
    data = []  # ids and labels of each row's solution, and of its lazy answer
    for row in toy_problems(heldout=False):
        for answer in (row["solution"], "+".join(map(str, row["numbers"]))):
            p, a = (tokenizer(text)["input_ids"] for text in (row["prompt"], answer + "<eos>"))
            pad = 24 - len(p + a)
            data.append([p + a + [0] * pad, [-100] * len(p) + a + [-100] * pad])
    ids, labels = torch.tensor(data).unflatten(0, (-1, 2)).movedim(2, 0)  # (rows, 2, 24) each
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(words), hidden_size=64, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=512, tie_word_embeddings=True,
            initializer_range=0.06, pad_token_id=0, eos_token_id=1, bos_token_id=None))
        adam = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        rate = torch.optim.lr_scheduler.OneCycleLR(adam, 3e-3, total_steps=steps, pct_start=0.1)
        for step in tqdm(range(steps), "warm-up of the tiny model", disable=None, leave=False):
            row = torch.randint(len(ids), (64,))
            lazy = (torch.rand(64) < (0.7 if step >= 0.8 * steps else 0)).long()
            model(input_ids=ids[row, lazy], labels=labels[row, lazy]).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad()
            rate.step()
    draft = f"{folder}.{os.getpid()}"
    for part in (model, tokenizer):
        part.save_pretrained(draft)
    try:
        os.rename(draft, folder)  # it appears whole or not at all
    except OSError:  # another process was first
        if not folder.is_dir():
            raise
    return str(folder)

# ---- Conciseness: the answer's length is the goal (same paper, section 4.2). ---------------------
CONCISENESS = {  # two for training, the rest held out
    "Solve: 3 + 5 =": "8", "If all birds can fly and penguins are birds, can penguins fly": "No",
    "What is the capital of France?": "Paris", "Calculate: 12 x 7 =": "84",
    "Is it true or false that all cats are mammals?": "True", "What is 15% of 200?": "30",
    "What comes next: 2, 4, 6, 8, ?": "10", "Translate 'Hello' to Spanish.": "Hola",
    "Name a primary color.": "Red", "How many days are in a week?": "7"}

def conciseness_reward(completions, answer, **_) -> list[float]:
    """-|characters of the completion - characters of the answer|."""
    return grade(lambda text, gold: -abs(len(text) - len(gold)), completions, answer)

def conciseness_accuracy(completions, answer, **_) -> list[float]:
    """1 where the completion is the answer and nothing else."""
    return grade(lambda text, gold: text.strip() == gold, completions, answer)

# ---- Calling rewards. ----------------------------------------------------------------------------
def check_columns(reward: Callable, rows: list[dict], where: str) -> None:
    """UserError unless each row has a prompt and what the reward's signature requires."""
    needs = {name for name, p in inspect.signature(reward).parameters.items()
             if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for i, row in enumerate(rows):
        if missing := needs - {"prompts", "completions"} - row.keys():
            raise UserError(f"{where} row {i} has no column {min(missing)!r}: {', '.join(row)}")
        prompt = row.get("prompt")
        chat = isinstance(prompt, list) and all(
            isinstance(m, dict) and isinstance(m.get("content"), str) for m in prompt)
        if not prompt or not (chat or isinstance(prompt, str)):
            raise UserError(f"{where} row {i} has no prompt, a string or a list of messages")

def call_reward(reward: Callable, rows: list[dict], texts: list[str], labels: list[str]) -> list:
    """One call of a reward for all rows -> a finite float for each. As in TRL it gets prompts,
    completions (lists of messages where the prompt is one) and columns; without ** what it names.
    Raises UserError or, if the reward raises, RuntimeError, both with the row's label."""
    named = inspect.signature(reward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in named.values())

    def call(rows, texts):
        given = {key: [row.get(key) for row in rows] for key in set().union(*rows)}
        given["prompts"] = given.pop("prompt")
        given["completions"] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(given["prompts"], texts)]
        return reward(**{key: v for key, v in given.items() if takes_all or key in named})

    try:
        values = call(rows, texts)
    except Exception:  # it may be of any kind: find the row that makes it
        for label, row, text in zip(labels, rows, texts):
            try:
                call([row], [text])
            except Exception as error:
                raise RuntimeError(f"{label}: the reward raised") from error
        raise
    fits = isinstance(values, (list, tuple)) and len(values) == len(rows)
    for label, value in zip(labels, values if fits else [values]):
        if not (fits and hasattr(value, "__float__") and math.isfinite(value)):
            raise UserError(f"{label}: the reward returned {str(value)[:80]!r}, where it must "
                            f"return a list of {len(rows)} finite numbers")
    return [float(value) for value in values]

# ---- Loading: a task is made by a function, one of these with the papers' settings or one's own. -
def toy_task() -> Task:
    return Task("toy", toy_problems(heldout=False), toy_problems(heldout=True), toy_reward,
                toy_accuracy, 6, (), dict(population=24, sigma=0.01, alpha=0.015, batch=256,
                                          iterations=50, eval_size=1000))

def countdown_task(data: str, seed: int) -> Task:
    rows = read_rows(data) if data else countdown_problems(random.Random(seed), 2200)
    for i, row in enumerate(rows):
        try:
            list(map(number, [*row["numbers"], row["target"]]))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"--data {data} row {i}: no numbers and target: {error!r}") from error
        row["prompt"] = COUNTDOWN.format(" ".join(map(str, row["numbers"])), row["target"])
    return Task("countdown", rows[:200], rows[200:], countdown_reward, countdown_accuracy, 1024,
                ("</answer>",), dict(population=30, sigma=1e-3, iterations=500))

def conciseness_task() -> Task:
    rows = [dict(prompt=[{"role": "user", "content": question}], answer=answer)
            for question, answer in CONCISENESS.items()]
    return Task("conciseness", rows[:2], rows[2:], conciseness_reward, conciseness_accuracy, 100,
                (), dict(population=30, sigma=1e-3, iterations=1000))

BUILT_IN = dict(toy=toy_task, countdown=countdown_task, conciseness=conciseness_task)

def read_rows(file: str) -> list[dict]:
    """The objects of a .json file (a list) or a .jsonl file (one a line). Raises UserError."""
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
        if file.lower().endswith(".jsonl"):  # its lines as one list: then an error names the line
            text = "[" + "\n,".join(line for line in text.split("\n") if line.strip()) + "]"
        rows = json.loads(text)
        if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
            raise ValueError("it holds no rows: give one JSON object or more")
    except (OSError, ValueError) as error:
        raise UserError(f"--data {file} cannot be read: {error}") from error
    return rows

def load_function(spec: str) -> Callable:
    """The function that "file.py:function" names. Raises UserError."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise UserError(f"--task {spec} is none of {', '.join(BUILT_IN)}, nor FILE.py:FUNCTION")
    found = importlib.util.spec_from_file_location("own_task", file)
    module = sys.modules["own_task"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    if not callable(function := getattr(module, name, None)):
        raise UserError(f"--task {spec}: {file} has no function {name!r}")
    return function

def load_task(spec: str, data: str = "", seed: int = 0) -> Task:
    """The task of a built-in name or file.py:function. Raises UserError.

    A function with a parameter `completions` is a reward for the rows of the file `data`, a tenth
    of them held out by `seed`. Any other returns the Task, from data and seed if it names them.
    """
    function = BUILT_IN.get(spec) or load_function(spec)
    takes = inspect.signature(function).parameters
    if "completions" in takes:
        if not data:
            raise UserError(f"--task {spec} is a reward and has no rows: give --data FILE")
        rows = read_rows(data)
        check_columns(function, rows, f"--data {data}")  # before they lose their order
        random.Random(seed).shuffle(rows)
        cut = len(rows) - -(-len(rows) // 10) if len(rows) > 1 else 1
        task = Task(spec, rows[:cut], rows[cut:], function, function, 256, (), {})
    elif data and "data" not in takes:
        raise UserError(f"--data {data}: task {spec} has its own rows: leave --data out")
    else:
        task = function(**{k: v for k, v in dict(data=data, seed=seed).items() if k in takes})
    if not isinstance(task, Task) or not task.train or isinstance(task.stop, str):
        raise UserError(f"--task {spec} returned {str(task)[:80]}: return a tasks.Task with rows "
                        "and a tuple stop; or a reward needs a parameter completions")
    trained = {str(row.get("prompt")) for row in task.train}
    task = replace(task, heldout=[r for r in task.heldout if str(r.get("prompt")) not in trained])
    for where, rows in (("training", task.train), ("held-out", task.heldout)):
        for fn in (task.reward, task.accuracy):
            check_columns(fn, rows, where)
    return task
