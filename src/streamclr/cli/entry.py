"""`streamclr …`: parse, call the command, and turn an error into one line and exit code 2."""

import os
import sys
from collections.abc import Sequence

from streamclr.base.errors import QuietExit, Stopped, UserError
from streamclr.base.extras import is_clone
from streamclr.base.options import redacted
from streamclr.base.plugins import look_in, names_plugin
from streamclr.base.progress import passing, say
from streamclr.cli.parser import parse
from streamclr.compute.allocator import keep_freed_memory

CORE_PACKAGES = ("torch", "numpy", "PIL", "safetensors", "rich", "matplotlib")  # the dependencies in pyproject.toml


def main(argv: Sequence[str] | None = None) -> int:
    keep_freed_memory()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it on import; its warnings are not for users
    try:
        with passing("streamclr: loading …"):  # torch takes seconds
            command, config = parse(sys.argv[1:] if argv is None else argv)
        if names_plugin(vars(config)):
            look_in(os.getcwd())
        return command(config) or 0
    except UserError as error:
        say("streamclr: " + " ".join(redacted(str(error)).split()))  # one line, even if it quotes several
        return 2
    except BrokenPipeError:  # `streamclr predict … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a directory without permission
        print(f"streamclr: {error.strerror or error}: {error.filename or 'unknown file'}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:  # a device may have only numpy and Pillow, enough to predict with ONNX
        if error.name not in CORE_PACKAGES:
            raise
        how = "pip install -c constraints.txt -e ." if is_clone() else f"pip install {error.name}"
        print(f"streamclr: this needs {error.name}: {how}", file=sys.stderr)
        return 2
    except QuietExit as silent:
        return silent.exit_code
    except Stopped as stopped:
        say(f"streamclr: {stopped}")
        return stopped.exit_code
    except KeyboardInterrupt:
        print("streamclr: interrupted", file=sys.stderr)
        return 130
