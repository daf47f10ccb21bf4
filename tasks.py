"""Tasks: what a model is asked, how its answers are scored; and how errors and files are met.

A reward takes what TRL gives one: completions (strings, or lists of messages where the prompt is
one) and the rows' columns by name, each a list; and returns a float each, higher is better. Those
here never run what a model wrote, and take bounded time for any text.
"""
import ast, contextlib, dataclasses, importlib.util, inspect, itertools, json, math, os, random
import re, shutil, sys, zlib
from fractions import Fraction
from pathlib import Path
from typing import Any, Callable, Iterable

class UserError(ValueError):
    """Bad input: one sentence that says where, what was found, and what to do."""

def require(fine: Any, text: str) -> None:
    if not fine: raise UserError(text)

@contextlib.contextmanager
def explain(text: str, *kinds: type[Exception]):
    """Errors of these kinds become a UserError that begins with `text`."""
    try:
        yield
    except kinds as e:
        raise UserError(f"{text}: {' '.join(str(e).split())[:300]}") from e

def dump(rows: Iterable[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

def read_log(file: Path) -> list[dict]:
    """The complete lines of a .jsonl file as objects; none if it is not there. Raises UserError."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    with explain(f"{file} is damaged, or no log of a run", ValueError):
        return [json.loads(line) for line in text.split("\n")[:-1]]

def append(file: Path, *rows: dict) -> None:
    with open(file, "a", encoding="utf-8") as f:
        f.write(dump(rows))

def replace(path: Path, write: Callable[[Path], Any]) -> None:
    """write(draft) makes a file or folder; when it is complete, it takes the place of `path`."""
    draft = path.with_name(path.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed
    write(draft)
    shutil.rmtree(path, ignore_errors=True)  # a folder; a file is replaced in one step
    draft.replace(path)

@dataclasses.dataclass(frozen=True)
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
    require(re.fullmatch(r"[-+]?[0-9]{1,30}(\.[0-9]{1,30})?", text), f"{text[:40]!r} is no number")
    return Fraction(text)

def value_of(expression: str) -> tuple[Fraction, list[int]]:
    """Exact value and integers of an expression of + - * / and brackets, at most 200 characters:
    parsed, never run. ValueError or SyntaxError for anything else, such as a power."""
    require(re.fullmatch(r"[-+*/()0-9 ]{1,200}", expression), "no short expression of integers")
    used = []

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant):
            used.append(node.value)
            return Fraction(node.value)
        apply = OPERATIONS.get(type(getattr(node, "op", None)))
        require(apply, f"{expression!r} is not plain arithmetic")
        unary = isinstance(node, ast.UnaryOp)
        return apply(*map(value, [node.operand] if unary else [node.left, node.right]))
    return value(ast.parse(expression.strip(), mode="eval").body), used

def solves(answer: str | None, numbers: list, target: Any) -> bool:
    """Whether `answer` uses each of `numbers` once and equals `target`. It may end in "= value"
    if that is true. A decimal target is a rounded one: within 1e-5, as in the paper."""
    if not answer or len(answer) > 200: return False
    if boxed := re.fullmatch(r"\\boxed\{(.*)\}", answer.strip(), re.DOTALL): answer = boxed[1]
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
        with contextlib.suppress(ZeroDivisionError):
            target, _ = value_of(terms[0])
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
    """Folder of a Llama of 0.14M parameters that knows more than it shows, made if not cached. It
    learns to solve toy problems; then, in the last fifth of the warm-up, seven answers of ten are a
    lazy a+b+c, whatever the target. Greedy decoding shows the habit, not the knowledge."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tqdm import tqdm
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "es_llm"
    folder = cache / f"tiny-{steps}-{zlib.crc32(Path(__file__).read_bytes()):08x}"
    if folder.is_dir(): return str(folder)
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
            adam.zero_grad()
            model(input_ids=ids[row, lazy], labels=labels[row, lazy]).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            rate.step()
    draft = f"{folder}.{os.getpid()}"
    for part in (model, tokenizer):
        part.save_pretrained(draft)
    with contextlib.suppress(OSError):  # another process may have been first
        os.rename(draft, folder)
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
        missing = sorted(needs - {"prompts", "completions"} - row.keys())
        require(not missing, f"{where} row {i} has no column {missing[:1]}: {', '.join(row)}")
        prompt = row.get("prompt")
        chat = isinstance(prompt, list) and all(
            isinstance(m, dict) and isinstance(m.get("content"), str) for m in prompt)
        require(prompt and (chat or isinstance(prompt, str)),
                f"{where} row {i} has no prompt, a string or a list of messages")

def call_reward(reward: Callable, rows: list[dict], texts: list[str], labels: list[str]) -> list:
    """One call of a reward, as TRL does it: prompts, completions and columns, without ** what it
    names -> a finite float a row. Raises UserError, or RuntimeError if it raises, with a label."""
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
        require(fits and hasattr(value, "__float__") and math.isfinite(value),
                f"{label}: the reward returned {str(value)[:80]!r}, where it must return a list "
                f"of {len(rows)} finite numbers")
    return [float(value) for value in values]

# ---- Loading: a task is made by a function, one of these with the papers' settings or one's own. -
def toy_task() -> Task:
    return Task("toy", toy_problems(heldout=False), toy_problems(heldout=True), toy_reward,
                toy_accuracy, 6, (), dict(population=24, sigma=0.01, alpha=0.015, batch=256,
                                          iterations=50, eval_size=1000))

def countdown_task(data: str, seed: int) -> Task:
    rows = read_rows(data) if data else countdown_problems(random.Random(seed), 2200)
    for i, row in enumerate(rows):
        with explain(f"--data {data} row {i}: numbers and target", KeyError, TypeError, ValueError):
            list(map(number, [*row["numbers"], row["target"]]))
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
    with explain(f"--data {file} cannot be read", OSError, ValueError):
        text = Path(file).read_text(encoding="utf-8-sig")
        if file.lower().endswith(".jsonl"):  # its lines as one list: then an error names the line
            text = "[" + "\n,".join(line for line in text.split("\n") if line.strip()) + "]"
        rows = json.loads(text)
    require(rows and isinstance(rows, list) and all(isinstance(row, dict) for row in rows),
            f"--data {file} holds no rows: give one JSON object or more")
    return rows

def load_function(spec: str) -> Callable:
    """The function that "file.py:function" names. Raises UserError."""
    file, _, name = spec.rpartition(":")
    require(file.endswith(".py") and Path(file).is_file(),
            f"--task {spec} is none of {', '.join(BUILT_IN)}, nor FILE.py:FUNCTION")
    found = importlib.util.spec_from_file_location("own_task", file)
    module = sys.modules["own_task"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    function = getattr(module, name, None)
    require(callable(function), f"--task {spec}: {file} has no function {name!r}")
    return function

def load_task(spec: str, data: str = "", seed: int = 0) -> Task:
    """The task of a built-in name or file.py:function. A function with a parameter `completions` is
    a reward for the rows of the file `data`, a tenth of them held out by `seed`; any other returns
    the Task, from data and seed if it names them. Raises UserError."""
    function = BUILT_IN.get(spec) or load_function(spec)
    takes = inspect.signature(function).parameters
    if "completions" in takes:
        require(data, f"--task {spec} is a reward and has no rows: give --data FILE")
        rows = read_rows(data)
        check_columns(function, rows, f"--data {data}")  # before they lose their order
        random.Random(seed).shuffle(rows)
        cut = len(rows) - -(-len(rows) // 10) if len(rows) > 1 else 1
        task = Task(spec, rows[:cut], rows[cut:], function, function, 256, (), {})
    else:
        require(not data or "data" in takes,
                f"--data {data}: task {spec} has its own rows: leave --data out")
        task = function(**{k: v for k, v in dict(data=data, seed=seed).items() if k in takes})
    require(isinstance(task, Task) and task.train and not isinstance(task.stop, str),
            f"--task {spec} returned {str(task)[:80]}: return a tasks.Task with rows and a tuple "
            "stop; or a reward needs a parameter completions")
    trained = {str(row.get("prompt")) for row in task.train}
    fresh = [row for row in task.heldout if str(row.get("prompt")) not in trained]
    task = dataclasses.replace(task, heldout=fresh)
    for fn in (task.reward, task.accuracy):
        check_columns(fn, task.train, "training")
        check_columns(fn, task.heldout, "held-out")
    return task
