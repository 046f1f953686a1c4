"""`nanokit model …`: what its actions are called, what `--help` says of them, and what they run."""

import argparse
import sys
from pathlib import Path


def add_actions(model: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The actions of `nanokit model`."""
    fetch = model.add_parser("fetch", help="download the default model once and print its path")
    fetch.add_argument("--verify", action="store_true", help="hash a file that is already there")
    fetch.set_defaults(command=_fetch)
    synth = model.add_parser("synth", help="write random weights in the shapes of a model, to measure its speed here")
    synth.add_argument("path", nargs="?", help="the file to write (default: NAME-TYPE-random.gguf, here)")
    synth.add_argument("--like", required=True, metavar="NAME", help="such as qwen2-7b; a name unknown lists them")
    synth.add_argument("--type", default="q4_1", help="of every matrix: q4_0, q4_1, q8_0, q4_k, … (%(default)s)")
    synth.add_argument("--seed", type=int, default=0, help="equal seeds give equal files (%(default)s)")
    synth.add_argument("--force", action="store_true", help="replace a file that is there already")
    synth.set_defaults(command=_synth)

    info = model.add_parser("info", help="what a model file is, and where its bytes lie")
    info.add_argument("file", help="a .gguf file, a .safetensors file, or a folder of them")
    info.add_argument("--compare", metavar="FILE", help="another file of the same model: where the bytes differ")
    info.add_argument("--json", metavar="FILE", help="write every tensor's bytes there; - is standard output")
    info.set_defaults(command=_info)

    convert = model.add_parser("convert", help="a folder of safetensors into a verified GGUF file, or the other way")
    convert.add_argument("source", help="a folder of safetensors or org/name on the hub; for a folder, a .gguf file")
    convert.add_argument("target", metavar="OUT", help="….gguf; any other name is that of a new folder")
    convert.add_argument("--type", help="of every matrix: f32, f16 (of folders), bf16, q4_0, q4_1 (of files), …")
    convert.add_argument("--align", type=int, metavar="N", help="of tensors in a file, in bytes (default: 32)")
    convert.add_argument("--rope-freq-base", type=float, help="checked against the source; another one needs --force")
    convert.add_argument("--rope-freq-scale", type=float, help="likewise: 1 / the linear scaling factor")
    convert.add_argument("--shard-size", metavar="SIZE", help="such as 2GB: more weights become several files")
    convert.add_argument("--force", action="store_true", help="replace an earlier one; allow other rope parameters")
    convert.set_defaults(command=_convert)

    verify = model.add_parser("verify", help="does a GGUF file say what its model is? a table of checks")
    verify.add_argument("file", help="a .gguf file; of one in shards, any")
    verify.add_argument("--against", metavar="SOURCE", help="what it was made from: a folder, or another model file")
    verify.add_argument("--fix", metavar="OUT", help="first write ….gguf with what can be mended without a source")
    verify.add_argument("--force", action="store_true", help="with --fix: replace a file that is there already")
    verify.add_argument("--json", metavar="FILE", help="write the report there; - is standard output")
    verify.set_defaults(command=_verify)

    smoke = model.add_parser("smoke", help="what a model file's behaviour says, when no source is at hand")
    smoke.add_argument("file", help="a .gguf file")
    smoke.add_argument("--preset", default="quick", help="smoke, quick (the default) or full: longer texts")
    smoke.add_argument("--json", metavar="FILE", help="write the figures there; - is standard output")
    smoke.set_defaults(command=_smoke)

    repair = model.add_parser("repair", help="a new file with keys and tensors put right from the model's source")
    repair.add_argument("file", help="the .gguf file that is wrong; it stays as it is")
    repair.add_argument("target", metavar="OUT", help="….gguf")
    repair.add_argument("--from", required=True, dest="origin", metavar="SOURCE", help="what it was made from")
    repair.add_argument(
        "--inject", action="extend", nargs="+", default=[], metavar="TENSOR",
        help="also take these tensors, by GGUF name or pattern: blk.3.ffn_up.weight, 'blk.*.attn_k.weight'",
    )  # fmt: skip
    repair.add_argument("--force", action="store_true", help="replace a file that is there already")
    repair.set_defaults(command=_repair)


def _fetch(args: argparse.Namespace) -> int:
    from nanokit.model.fetch import TerminalProgress, fetch_default_model

    with TerminalProgress() as progress:
        path = fetch_default_model(progress=progress, verify=args.verify)
    print(path)
    return 0


def _synth(args: argparse.Namespace) -> int:
    from nanokit.model.fetch import TerminalProgress
    from nanokit.model.synth import synthesize

    path = Path(args.path or f"{args.like}-{args.type}-random.gguf".lower()).expanduser()
    with TerminalProgress() as progress:
        shown = progress if sys.stderr.isatty() else None
        synthesize(args.like, args.type, path, seed=args.seed, force=args.force, progress=shown)
    print("nanokit: the weights are random: measure speed with them; any text they write is noise", file=sys.stderr)
    print(path)
    return 0


def _info(args: argparse.Namespace) -> int:
    from nanokit.lab import model_info

    return model_info.main(args.file, args.compare, args.json)


def _verify(args: argparse.Namespace) -> int:
    from nanokit.lab import model_verify

    return model_verify.main(args)


def _smoke(args: argparse.Namespace) -> int:
    from nanokit.lab import model_verify

    return model_verify.smoke(args)


def _repair(args: argparse.Namespace) -> int:
    from nanokit.model.console import repair

    return repair(args)


def _convert(args: argparse.Namespace) -> int:
    from nanokit.model.console import convert

    return convert(args)
