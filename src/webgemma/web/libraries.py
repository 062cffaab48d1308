"""The JavaScript libraries of the page: which files are served below /lib/, and where they lie.

They come from npm: a wheel has them in web/lib, where its build puts them, a checkout in
node_modules."""

from dataclasses import dataclass
from pathlib import Path

PACKAGED = Path(__file__).parent / "lib"
CHECKOUT = Path(__file__).parents[3] / "node_modules"


@dataclass(frozen=True, slots=True)
class Library:
    """Some files of an npm package, and the folder of the package in which they lie."""

    package: str
    files: tuple[str, ...]
    folder: str = ""


# By the folder below /lib/; scripts of the page import them as "./lib/FOLDER/FILE".
LIBRARIES = {
    "markdown-it": Library("markdown-it", ("markdown-it.esm.min.mjs",), "dist/browser"),
    "markdown-it-footnote": Library("markdown-it-footnote", ("index.mjs",)),
    "markdown-it-sub": Library("markdown-it-sub", ("index.mjs",)),
    "markdown-it-sup": Library("markdown-it-sup", ("index.mjs",)),
    "temml": Library("temml", ("temml.mjs",), "dist"),
    "highlight": Library("@highlightjs/cdn-assets", ("highlight.min.js",), "es"),
    "dompurify": Library("dompurify", ("purify.es.mjs",), "dist"),
    "pdfjs": Library("unpdf", ("pdfjs.mjs",), "dist"),  # PDF.js for workers, in one file
}


def library_files() -> dict[str, Path]:
    """Return the files that are there, by their paths below /lib/."""
    files = {}
    for name, library in LIBRARIES.items():
        packaged, checkout = PACKAGED / name, CHECKOUT / library.package / library.folder
        folder = packaged if packaged.is_dir() else checkout
        files |= {f"{name}/{file}": folder / file for file in library.files}
    return {name: path for name, path in files.items() if path.is_file()}
