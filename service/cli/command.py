"""The command `onedesk`: parses, calls, prints. Exit 0 success, 1 failure, 2 wrong usage or option value, 130 interrupted."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config, load_config, own_version
from ..console import (
    Stop,
    UsageError,
    discard_stdout,
    ends_as_interrupted,
    failure,
    make_streams_safe,
    read_line,
    read_piped_text,
    read_text_file,
    write_json,
)
from ..core import (
    BEAMS_LIMIT,
    CHOICES_LIMIT,
    QUANTIZATIONS,
    Message,
    Request,
    Sampling,
)
from ..errors import Cancelled, OnedeskError, RequestError
from . import quantize
from .options import (
    Parser,
    as_typed,
    batches,
    number,
    size,
    switch,
    token_ids,
    whole,
    whole_from,
)
from .output import answered, document, run_request
from .serve import serve, serve_options

if TYPE_CHECKING:
    from ..api import OpenModel

log = logging.getLogger(__name__)

SUCCESS, FAILURE, USAGE, INTERRUPTED = 0, 1, 2, 130
CLEAR = "\x1b[H\x1b[2J"  # a terminal's screen
WATCH_SECONDS = 1.0
NO_COMMAND = 'no command was given; try onedesk models, or onedesk generate "a cat on a mat"; onedesk --help lists all'
# What is meant where no --model is given, unless it is one model; no default is told where none is opened.
_MODEL_DEFAULTS: Mapping[str, str] = {"models": "; default: all", "serve": "; default: all", "memory": "", "doctor": "", "demo": ""}
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
_FORMATS = ("onedesk: %(message)s", logging.BASIC_FORMAT)  # where a message comes from is of use with -v alone


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    make_streams_safe()
    try:
        status = _run(arguments, as_json="--json" in options)
        sys.stdout.flush()
    except OSError as error:
        discard_stdout()
        if not isinstance(error, BrokenPipeError):
            print(f"onedesk: standard output takes no more ({error.strerror}); free some room or write elsewhere", file=sys.stderr)
        return FAILURE
    return status


def _run(arguments: list[str], *, as_json: bool) -> int:
    args = argparse.Namespace()
    try:
        if not arguments:
            raise UsageError(NO_COMMAND)
        args, unknown = _parser().parse_known_args(arguments)
        if unknown:
            words = "" if unknown[0].startswith("-") else "; put a text of several words in quotes"
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{words}")
        logging.basicConfig(stream=sys.stderr, level=_LEVELS[min(args.verbose, 2)], format=_FORMATS[args.verbose > 0], force=True)
        return args.run(args)
    except UsageError as error:
        return _fail(error, USAGE, as_json)
    except (KeyboardInterrupt, Cancelled):
        return _fail(Cancelled("interrupted"), INTERRUPTED, as_json)
    except BrokenPipeError:
        raise
    except (OnedeskError, OSError, RuntimeError, MemoryError, ImportError) as error:
        # RuntimeError: what torch raises when a device fails or has no memory left; ImportError: no torch here (see onedesk doctor)
        log.debug("the command failed", exc_info=True)
        return _fail(error, FAILURE, as_json, args)


def _fail(error: Exception, status: int, as_json: bool, args: argparse.Namespace | None = None) -> int:
    message = as_typed(error, args or ())
    if as_json:
        write_json(failure(error, message))
    else:
        print(f"onedesk: {message}", file=sys.stderr)
    return status


def _generate(args: argparse.Namespace) -> int:
    options = _checked_options(args, repetition_stop=args.repetition_stop, n=args.n, best_of=args.best_of, beams=args.beams)
    request = _request(args, options).validated()
    config = load_config(args.config)
    stop = Stop()
    with stop.listening(), _opened(args, config) as model:
        results = run_request(model, request, stop, quiet=args.json)
    if args.json:
        documents = [document(result) for result in results]
        write_json(documents[0] if args.n == 1 else {"choices": documents})
    return INTERRUPTED if stop.asked else SUCCESS if all(map(answered, results)) else FAILURE


def _chat(args: argparse.Namespace) -> int:
    options = _checked_options(args)
    start = [Message("system", args.system)] if args.system else []
    history = list(start)
    stop = Stop()
    with stop.listening(), _opened(args, load_config(args.config)) as model:
        if stop.asked:
            raise Cancelled("interrupted")
        print("Write a message. /reset starts anew, /exit or Ctrl-D ends.", file=sys.stderr)
        while (line := read_line("> ")) is not None and line.strip() != "/exit":
            if line.strip() == "/reset":
                history = list(start)
            elif line.strip():
                history = _turn(model, options, [*history, Message("user", line)], stop)
    return SUCCESS


def _turn(model: OpenModel, options: dict[str, Any], history: list[Message], stop: Stop) -> list[Message]:
    """Answer the last message; returns the history that the next turn starts from, without what could not be answered."""
    stop.asked = False
    try:
        result = run_request(model, Request(messages=tuple(history), **options).validated(), stop, quiet=False)[0]
    except RequestError as error:
        print(f"onedesk: {error} (/reset starts anew)", file=sys.stderr)
        return history[:-1]
    return [*history, Message("assistant", result.text, result.reasoning)] if result.text.strip() else history[:-1]


def _score(args: argparse.Namespace) -> int:
    if (args.ids is None) == (args.text_file is None):
        raise UsageError("score needs either --ids or --text-file; see onedesk score --help")
    text = None if args.text_file is None else read_text_file(args.text_file)
    from ..engine.scoring import perplexity

    stop = Stop()
    with stop.listening(), _opened(args, load_config(args.config)) as model:
        if text is None:
            logprobs, windows = model.score(args.ids, cancel=stop), 1
        else:
            logprobs, windows = model.score_text(text, cancel=stop)
    score = {"tokens": len(logprobs) + 1, "logprobs": logprobs, "perplexity": perplexity(logprobs), "windows": windows}
    if args.json:
        write_json(score)
    else:
        told = f"perplexity {score['perplexity']:.7g}" if logprobs else "no perplexity, since the first token has nothing before it,"
        print(f"{told} over {_counted(score['tokens'], 'token')} in {_counted(windows, 'window')}")
    return SUCCESS


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def _models(args: argparse.Namespace) -> int:
    from ..catalog.inventory import model_rows, model_table

    rows = model_rows(load_config(args.config), args.model, device=args.device, context=args.context, quant=args.quant)
    write_json(rows) if args.json else print(model_table(rows))
    return SUCCESS


def _quantize(args: argparse.Namespace) -> int:
    done = quantize.run(args)
    write_json(asdict(done)) if args.json else print(quantize.told(done))
    return SUCCESS


def _memory(args: argparse.Namespace) -> int:
    from ..catalog.memory_report import memory_report, memory_table, with_service

    if args.watch and args.json:
        raise UsageError("--watch shows a table again and again; --json prints one document: give one of them")
    config = load_config(args.config)
    while True:
        report = memory_report(config, device=args.device, proc=args.proc)
        report = report if args.proc else with_service(report, config)
        if args.json:
            write_json(report)
        else:
            print((CLEAR if args.watch and sys.stdout.isatty() else "") + memory_table(report), flush=True)
        if not args.watch:
            return SUCCESS
        time.sleep(WATCH_SECONDS)


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import examine

    if args.plan is not None:
        from ..catalog import plan, plan_report

        planned = plan.run(args)
        write_json(planned) if args.json else print(plan_report.plan_table(planned))
        return SUCCESS
    if args.memory is not None or args.images is not None or args.nodes != 1:
        raise UsageError("--memory, --images and --nodes are for --plan; see onedesk doctor --help")
    if args.check is None:
        checks = examine(args.config, device=args.device)
    else:
        from ..catalog.inventory import model_roots
        from .check import check_model

        config = load_config(args.config)
        checks = check_model(args.check, config, model_roots(config), device=args.device, context=args.context, quant=args.quant)
    ok = all(check.status != "failure" for check in checks)
    if args.json:
        write_json({"ok": ok, "checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            print(f"{check.status:<8} {check.name}: {check.detail}" + (f"\n         {check.fix}" if check.fix else ""))
    return SUCCESS if ok else FAILURE


def _bench(args: argparse.Namespace) -> int:
    from ..bench.kinds import kind_table, measure_kind
    from ..bench.run import Plan
    from ..catalog.inventory import default_model, model_roots
    from ..engine.buffers import MAX_BATCH

    if args.batch != [1] and (args.kind != "decode" or max(args.batch) > MAX_BATCH):
        raise UsageError(f"--batch {','.join(map(str, args.batch))}: only decode is measured in batches, of up to {MAX_BATCH} rows")
    config = load_config(args.config)
    name = args.model or ("" if args.kind == "handover" else default_model(config))
    if name is None:
        raise UsageError("no model is named; use --model NAME, FOLDER, FILE, or a shape such as qwen3-0.6b (random weights)")
    plan = Plan(args.kind, name, args.quant, args.device, args.tokens, args.prompt, args.cycles, args.against, tuple(args.batch))
    document = measure_kind(plan, config, model_roots(config))
    write_json(document) if args.json else print(kind_table(document))
    return SUCCESS


def _demo(args: argparse.Namespace) -> int:
    from .demo import run_demo

    if args.model is not None or args.quant != "none" or args.context is not None:
        raise UsageError("the demo has its own two models: leave --model, --quant and --context out; onedesk generate takes them")
    with ends_as_interrupted():
        result = run_demo(args.idea, load_config(args.config))
    if args.json:
        write_json(asdict(result) | {"picture": str(result.picture)})
    else:
        print(f"idea:    {result.idea}\nprompt:  {result.prompt}\npicture: {result.picture}")
    return SUCCESS


@contextmanager
def _opened(args: argparse.Namespace, config: Config) -> Iterator[OpenModel]:
    """The model that was asked for, or the default one; it loads when it is first used."""
    from ..catalog.inventory import default_model, model_roots, usual_context
    from ..registry import REGISTRY

    name = default_model(config) if args.model is None else args.model
    if name is None:
        raise UsageError("no model is named; use --model NAME, FOLDER or FILE (onedesk models lists the names)")
    REGISTRY.configure(config)
    roots = model_roots(config)
    path = roots.find(name)
    try:
        context = args.context or usual_context(config, path, roots)
        yield REGISTRY.open(path, roots=roots, context=context, quant=args.quant, device=args.device, load=False)
    finally:
        REGISTRY.close()


def _checked_options(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The options of a request, checked before anything is read or loaded: a wrong value is wrong usage."""
    if args.greedy and args.temperature:
        raise UsageError("--greedy and --temperature exclude each other; give one of them")
    sampling = Sampling(
        temperature=0.0 if args.greedy else args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed
    )
    options: dict[str, Any] = {
        "sampling": sampling,
        "max_tokens": args.max_tokens,
        "stop": tuple(args.stop),
        "thinking": args.thinking,
        "thinking_budget": args.thinking_budget,
        **more,
    }
    try:
        Request(ids=(0,), **options).validated()
    except RequestError as error:
        raise UsageError(as_typed(error, args)) from error
    return options


def _request(args: argparse.Namespace, options: dict[str, Any]) -> Request:
    if args.ids is not None:
        if args.prompt is not None or args.system is not None:
            raise UsageError("--ids is the whole prompt; leave PROMPT and --system out")
        return Request(ids=args.ids, **options)
    prompt = args.prompt
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("no PROMPT and no --ids; see onedesk generate --help")
    if prompt is None or prompt == "-":
        piped = read_piped_text()
        if prompt is None and not piped:
            raise UsageError("no PROMPT and no --ids; see onedesk generate --help")
        prompt = piped
    system = [Message("system", args.system)] if args.system else []
    return Request(messages=(*system, Message("user", prompt)), **options)


def _parser() -> argparse.ArgumentParser:
    words = "onedesk models lists what can be opened; onedesk COMMAND --help tells the options of a command."
    about = "Qwen beside your image models in one memory pool, offline."
    parser = Parser("onedesk", description=about, epilog=words, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"onedesk {own_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str, *, json: bool = True, model: str = "store"
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(run=run, parser=added)
        words = "a name as `onedesk models` lists it, or a path" + _MODEL_DEFAULTS.get(name, "; default: the configured or the only one")
        added.add_argument("--model", action=model, metavar="NAME|FOLDER|FILE", help=words)
        words = "hold the weights as stored (none, the default), or in 8 or 4 bits"
        added.add_argument("--quant", choices=QUANTIZATIONS, default="none", help=words)
        words = "tokens that prompt and answer may have together, 2 or more; default: that of the configuration, else 4096"
        added.add_argument("--context", type=whole_from(2), metavar="N", help=words)
        added.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto, the default: CUDA where there is one")
        added.add_argument("--config", type=Path, metavar="FILE", help="another onedesk.toml than the installation's")
        added.add_argument("-v", "--verbose", action="count", default=0, help="say more on stderr; twice for everything")
        if json:
            added.add_argument("--json", action="store_true", help="one JSON document on stdout")
        return added

    generate = command("generate", _generate, "Answer one prompt.")
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - or a pipe reads standard input")
    generate.add_argument("--ids", type=token_ids, metavar="1,2,3", help="raw token ids in place of a prompt: no template, no tokenizer")
    words = f"choices, 1 (the default) to {CHOICES_LIMIT}, written together; choice i has seed + i"
    generate.add_argument("--n", type=whole_from(1), default=1, metavar="N", help=words)
    words = f"write so many, --n to {CHOICES_LIMIT}, and give the likeliest --n of them"
    generate.add_argument("--best-of", type=whole_from(1), metavar="N", help=words)
    words = f"search for the likeliest text instead of drawing, so many wide: --n to {BEAMS_LIMIT}"
    generate.add_argument("--beams", type=whole_from(1), metavar="N", help=words)
    words = "end when the text runs in a circle; default on, with --ids off"
    generate.add_argument("--repetition-stop", type=switch, metavar="on|off", help=words)
    _add_sampling(generate)
    _add_sampling(command("chat", _chat, "Talk with a model; the conversation is kept until /reset.", json=False))
    score = command("score", _score, "Log-probabilities and perplexity of a text.")
    score.add_argument("--ids", type=token_ids, metavar="1,2,3", help="raw token ids, no more than the context")
    score.add_argument("--text-file", type=Path, metavar="F", help="a UTF-8 text; one longer than the context is read in windows")
    command("models", _models, "The models that can be opened, and whether they fit.")
    quantize.add_options(command("quantize", _quantize, "Convert a model once to --quant int8 or int4; later openings find that."))
    memory = command("memory", _memory, "What the memory is, what of it Onedesk may use, and who holds it.")
    memory.add_argument("--watch", action="store_true", help="show it again every second, until Ctrl-C")
    memory.add_argument("--proc", type=Path, metavar="DIR", help="read another machine's copied /proc")
    doctor = command("doctor", _doctor, "Examine this installation, and say what to do about what is wrong.")
    doctor.add_argument("--check", metavar="MODEL", help="write one text five times with this model and compare every byte")
    doctor.add_argument("--plan", metavar="NAME|FOLDER", help="in which form this model would fit, from its config alone")
    doctor.add_argument("--memory", type=size, metavar="SIZE", help="plan for a machine that has so much, such as 121GiB")
    doctor.add_argument("--images", type=size, metavar="SIZE", help="plan beside image models that take so much")
    doctor.add_argument("--nodes", type=whole_from(1), default=1, metavar="N", help="plan for N such machines together; default 1")
    bench = command("bench", _bench, "Measure load, prefill, decode, first token or hand-over, beside the read bandwidth.")
    bench.add_argument("kind", choices=("load", "prefill", "decode", "ttft", "handover"), help="what is measured; ttft: the first token")
    bench.add_argument("--batch", type=batches, default=[1], metavar="1,2,4,8", help="rows that decode together, 1 (the default) to 8")
    bench.add_argument("--tokens", type=whole_from(2), default=0, metavar="N", help="tokens to decode; default 64, handover 16")
    bench.add_argument("--prompt", type=whole_from(1), default=0, metavar="N", help="tokens of the prompt; default 512, decode 128")
    bench.add_argument("--cycles", type=whole_from(1), default=0, metavar="N", help="how often each is measured; default 5, handover 300")
    bench.add_argument("--against", choices=("transformers", "llama.cpp"), help="measure it too, in the same run")
    serve_options(
        command("serve", serve, "Answer over HTTP as OpenAI's API does (--model: names; repeatable).", json=False, model="append")
    )
    demo = command("demo", _demo, "Idea in, written prompt and picture out, with the toy models that come along.")
    demo.add_argument("idea", metavar="IDEA", help="what the picture shall show, in a few words")
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="S", help="the system prompt")
    parser.add_argument("--max-tokens", type=whole, default=512, metavar="N", help="tokens of the answer, 1 or more; default %(default)s")
    own = "default: the model's own"
    parser.add_argument("--temperature", type=number, metavar="T", help=f"0 (always the likeliest token) or more; {own}")
    parser.add_argument("--top-p", type=number, metavar="P", help=f"draw among the likeliest that make up so much, above 0 to 1; {own}")
    parser.add_argument("--top-k", type=whole, metavar="K", help=f"draw among so many, 0: all; {own}")
    parser.add_argument("--min-p", type=number, metavar="M", help=f"0 to 1: not what is less likely than M times the likeliest; {own}")
    parser.add_argument("--seed", type=whole, metavar="S", help="0 to 2^64-1; default: drawn anew, and told with --json")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    parser.add_argument("--stop", action="append", default=[], metavar="STR", help="end before this text; may be repeated")
    words = "let the model reason first; auto, the default: as its chat template has it"
    parser.add_argument("--thinking", choices=("on", "off", "auto"), default="auto", help=words)
    words = "tokens of reasoning, 0 or more; default: what the context leaves beside the answer"
    parser.add_argument("--thinking-budget", type=whole, metavar="N", help=words)


if __name__ == "__main__":
    sys.exit(main())
