"""Kernel backends behind one contract: `reference` is plain torch.

The folder is installed as `nanokit.kernels`. With a checkout's own root on the path Python also finds it as
`kernels`, the name of a Hugging Face package that transformers looks for and asks for its version. Raising here
would break transformers in that folder; so under the wrong name the module is empty, has no version (which
transformers takes for "not installed"), and nothing below it can be imported a second time.
"""

if __name__ == "kernels":
    globals()["__path__"] = []
