"""The JavaScript libraries of the page: which files are served below /lib/, and where they lie.

They come from npm: a wheel has them in web/lib, where its build (hatch_build.py, which reads this
table, too) puts them, a checkout in node_modules."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGED = Path(__file__).parent / "lib"
CHECKOUT = Path(__file__).parents[3] / "node_modules"
# Texts of licences that other packages lack; of DOMPurify, nothing else is used.
MPL, APACHE, PSF = "dompurify/LICENSE-MPL", "dompurify/LICENSE", "argparse/LICENSE"


@dataclass(frozen=True, slots=True)
class Library:
    """Some files of an npm package, and the folder of the package in which they lie."""

    package: str
    files: tuple[str, ...]
    folder: str = ""
    # Texts of licences by the names that they get in a wheel, where the package has no LICENSE.
    licences: Mapping[str, str] = field(default_factory=dict)


# Languages of highlight.js that highlight.min.js does not have, loaded when they are first shown.
_RARER = (
    "ada apache awk clojure cmake crystal d dart delphi dockerfile dos elixir elm erlang fortran "
    "fsharp glsl gradle groovy haskell http julia latex lisp llvm matlab nginx nim nix ocaml "
    "powershell prolog properties protobuf scala scheme tcl verilog vhdl vim x86asm"
)
_LANGUAGES = tuple(f"languages/{name}.min.js" for name in _RARER.split())

# By the folder below /lib/; scripts of the page import them as "./lib/FOLDER/FILE".
LIBRARIES = {
    "pyodide": Library(  # Python in the browser
        "pyodide",
        (
            "pyodide.mjs",
            "pyodide.asm.mjs",
            "pyodide.asm.wasm",
            "pyodide-lock.json",
            "python_stdlib.zip",
        ),
        licences={"LICENSE": MPL, "LICENSE-PYTHON": PSF},
    ),
    "xgrammar": Library(  # for replies that keep to a schema
        "@mlc-ai/web-xgrammar", ("index.js",), "lib", {"LICENSE": APACHE}
    ),
    "markdown-it": Library("markdown-it", ("markdown-it.esm.min.mjs",), "dist/browser"),
    "markdown-it-footnote": Library("markdown-it-footnote", ("index.mjs",)),
    "temml": Library("temml", ("temml.min.js", "Temml-Local.css", "Temml.woff2"), "dist"),
    "highlight": Library("@highlightjs/cdn-assets", ("highlight.min.js", *_LANGUAGES), "es"),
    "pdfjs": Library(  # PDF.js for workers, in one file
        "unpdf", ("pdfjs.mjs",), "dist", {"LICENSE": "unpdf/LICENSE", "LICENSE-PDFJS": APACHE}
    ),
}


def library_files() -> dict[str, Path]:
    """Return the files that are there, by their paths below /lib/."""
    files: dict[str, Path] = {}
    for name, library in LIBRARIES.items():
        packaged, checkout = PACKAGED / name, CHECKOUT / library.package / library.folder
        folder = packaged if packaged.is_dir() else checkout
        files |= {f"{name}/{file}": folder / file for file in library.files}
    return {name: path for name, path in files.items() if path.is_file()}


def licence_files() -> dict[str, Path]:
    """Return the texts of the libraries' licences that are there, by their paths below /lib/."""
    files: dict[str, Path] = {}
    for name, library in LIBRARIES.items():
        packaged = PACKAGED / name
        texts = library.licences or {"LICENSE": f"{library.package}/LICENSE"}
        for file, path in texts.items():
            files[f"{name}/{file}"] = packaged / file if packaged.is_dir() else CHECKOUT / path
    return {name: path for name, path in files.items() if path.is_file()}


def missing_message(files: Mapping[str, Path]) -> str:
    """Return which libraries are not among the files, and what to do; "" if all are there."""
    missing = [
        name
        for name, library in LIBRARIES.items()
        if any(f"{name}/{file}" not in files for file in library.files)
    ]
    if not missing:
        return ""
    checkout = CHECKOUT.parent
    advice = (
        f"run `npm ci` in {checkout}"
        if (checkout / "package-lock.json").is_file()
        else "install a wheel that `make wheel` has built in a checkout"
    )
    return f"JavaScript libraries of the page are missing ({', '.join(missing)}): {advice}."
