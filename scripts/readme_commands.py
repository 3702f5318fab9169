"""Prints the `maxlite` commands of a README's shell blocks as one script, for CI to run each of them.

A command that needs what no laptop has is marked by a comment line with "needs accelerators" or "needs maxlite[tpu]"
before it; that one is checked by resolving its config instead.
"""

import pathlib
import re
import sys

text = pathlib.Path(sys.argv[1]).read_text()
for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
    on_accelerators = False
    for line in block.splitlines():
        if line.startswith("#"):
            on_accelerators = "needs accelerators" in line or "needs maxlite[tpu]" in line
        elif line.startswith("maxlite "):
            command = line.split("  #")[0].rstrip()
            if on_accelerators:
                command = re.sub("^maxlite (train|estimate)", "maxlite config", command) + " > /dev/null"
            print(command)
            on_accelerators = False
