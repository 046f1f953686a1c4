"""Options that several subcommands share, or that are many: what they are called and what `--help` says of them."""

import argparse


def add_quality(quality: argparse.ArgumentParser) -> None:
    """What `nanokit quality` measures."""
    quality.add_argument("model", nargs="?", metavar="MODEL", help="as --model of generate (default: fetched once)")
    quality.add_argument(
        "--policy",
        nargs="+",
        action="extend",
        help="such as int4-sym-g64, one or several; keep (the default) changes nothing",
    )
    quality.add_argument("--reference", metavar="FILE", help="the model that it is compared with (default: itself)")
    quality.add_argument("--activations", help="as for generate")
    quality.add_argument("--kv", dest="kv_format", help="format of the KV pages, as --kv-format of generate")
    quality.add_argument("--ctx", type=int, metavar="N", help="length of a window; its second half is scored (512)")
    quality.add_argument("--batch", type=int, metavar="B", help="windows computed together (1)")
    quality.add_argument("--layout", help="page ids of a window: consecutive, the default, or scattered")
    quality.add_argument("--text", help="a text of data/texts (evaluation)")
    quality.add_argument("--windows", type=int, metavar="W", help="windows of the text (4)")
    quality.add_argument(
        "--task",
        dest="tasks",
        nargs="+",
        action="extend",
        metavar="T",
        help="also score arithmetic, completion or chat",
    )
    quality.add_argument("--items", type=int, metavar="I", help="items of each task, spread evenly (60)")
    quality.add_argument("--repeats", type=int, metavar="R", help="rounds of timing (3)")
    quality.add_argument("--preset", help="smoke, quick (the default) or full: all windows, all items")
    quality.add_argument("--threads", type=int, metavar="N", help="threads that compute (default: one a core)")
    quality.add_argument("--json", metavar="FILE", help="write the JSON there; - is standard output")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, help="0 is greedy, the default")
    group.add_argument("--top-k", type=int, help="draw from the K most likely tokens; 0, the default, is all")
    group.add_argument("--top-p", type=float, help="draw from the likeliest that reach P; 1, the default, is all")
    group.add_argument("--min-p", type=float, help="drop tokens less likely than P times the likeliest (0)")
    group.add_argument("--repetition-penalty", type=float, help="above 1 discourages tokens already there (1)")
    group.add_argument("--max-tokens", type=int, help="longest answer (128)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be given again")
    group.add_argument("--seed", type=int, help="repeats a sampled answer; drawn and shown if not given")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model, and how it is loaded."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", help=".gguf file, folder of safetensors, or org/name (default: fetched once)")
    group.add_argument("--ctx", type=int, help="longest prompt + answer, in tokens")
    group.add_argument("--kv-memory", help="memory for KV pages, such as 512MiB")
    group.add_argument("--kv-format", help="fp32, fp16 (the default), int8, int8-static, int4 or kivi4 pages")
    group.add_argument("--device", help="cpu (the default), cuda: a GPU, or interpreter: the GPU's kernels without one")
    group.add_argument(
        "--activations",
        help="inputs of products: a8g32 (the default), a8g16, a16, token, tensor, static; fp32 is transformers' own",
    )
    group.add_argument("--policy", help="quantize the weights at loading, such as int4-sym-g64 (default: as stored)")
    group.add_argument("--dynamic-scale", metavar="true|false", help="another name for --activations token | static")
    group.add_argument("--mapped", action="store_true", help="leave weights in the file: little memory, slow")
    group.add_argument("--rope-freq-base", type=float, help="override the model's own, with --force")
    group.add_argument("--rope-freq-scale", type=float, help="override the model's own, with --force")
    group.add_argument("--force", action="store_true", help="allow overrides that make answers worse")
