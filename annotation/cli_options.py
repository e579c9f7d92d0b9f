"""Options that several commands of `annotation` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HomeFolder = Annotated[Path, typer.Option("--home", metavar="DIR", envvar="PREFLOOP_ANNOTATION_HOME",
                                          help="folder of the server's data and the projects")]
DEFAULT_HOME = Path("annotation-home")
ProjectName = Annotated[str, typer.Argument(metavar="NAME", help="project: one round of annotation, for example week-48")]
Json = Annotated[bool, typer.Option("--json", help="exactly one JSON object on stdout; everything else on stderr")]
