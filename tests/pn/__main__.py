# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.pn FILE...`: golden vector files against the Python and the C code."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.pn import native, vectors


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pn", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--cc", default="cc", help="the C compiler (default: cc)")
    options = parser.parse_args()
    passed = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            checker = native.build(Path(folder) / "check", options.cc)
            for path in options.files:
                file = vectors.read(path)
                ok, wrong = native.run(checker, [vectors.as_line(file, v) for v in file.vectors])
                results = [(i, "C", why) for i, why in wrong.items()]
                for i, vector in enumerate(file.vectors):
                    why = vectors.check_python(file, vector)
                    if why:
                        results.append((i, "Python", why))
                    else:
                        ok += 1
                for i, code, why in sorted(results):
                    print(f"{path}: vector {i} ({file.vectors[i].get('note', 'no note')}): {code}: {why}")
                print(f"{path.name}: {len(file.vectors)} vectors, Python and C")
                passed, failed = passed + ok, failed + len(results)
        except (ValueError, TypeError, RuntimeError, OSError, KeyError) as error:
            what = f"a vector has no {error}" if isinstance(error, KeyError) else error
            print(f"tests.pn: {what}", file=sys.stderr)
            return 2
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
