"""The command line of ``dplab lab``."""

import argparse
import os
import sys
from pathlib import Path

from dplab import needs
from dplab.desk.course import key_of, label
from dplab.lab import jupyterlab
from dplab.lab.course_files import ROOT, read_course
from dplab.lab.notebook import Refused, UnreadableNotebook
from dplab.lab.working_copy import WorkingCopy

DEFAULT = "my_course"


def lab(arguments: list[str]) -> int:
    """Makes or refreshes the working copy, and starts JupyterLab on it; returns an exit status."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:at])
    place = Path(options.folder or ROOT / DEFAULT).expanduser().absolute()
    try:
        _open(place, options, arguments[at + 1:])
        return 0
    except UnreadableNotebook as error:
        text = f"{error}. Nothing was changed in it. Mend the file, or move it elsewhere"
    except Refused as error:
        text = str(error)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        text = (f"{error.strerror or error}{where}. Nothing of yours was changed. Make room in "
                f"{place}, or name another folder for your copy, such as `dplab lab ~/my_course`")
    except KeyboardInterrupt:
        print("\nstopped")
        return 130
    print(f"dplab lab: {text}.", file=sys.stderr)
    return 1


def _parser():
    parser = argparse.ArgumentParser(
        prog="dplab lab", description="Opens the course in JupyterLab, in a copy that is yours. "
        "Your files there stay as you leave them. What follows -- goes to JupyterLab, for example "
        "`dplab lab -- --port 9000`.")
    parser.add_argument("folder", nargs="?", metavar="FOLDER",
                        help=f"where your copy lies (default: {DEFAULT} in the clone)")
    parser.add_argument("--update", action="append", metavar="CHAPTER", default=[],
                        help="bring the course's newer version of a chapter over, such as 04, or "
                        "`all`; your answers come along, and your whole old notebook is kept "
                        "beside it")
    parser.add_argument("--fresh", action="append", metavar="CHAPTER", default=[],
                        help="begin a chapter anew, such as 05, also where its notebook is broken; "
                        "your old one is kept beside it")
    parser.add_argument("--import", dest="source", type=Path, metavar="FOLDER",
                        help="take over your answers from notebooks of the course in another "
                        "folder, where your copy has none")
    parser.add_argument("--no-browser", action="store_true",
                        help="print the address, and open no browser")
    parser.add_argument("--copy-only", action="store_true",
                        help="do all this without starting JupyterLab")
    return parser


def _open(place, options, for_jupyter):
    print(f"The course in a copy of yours: {place}", flush=True)
    copy = WorkingCopy(place, read_course(ROOT))
    _check_place(place, ROOT)
    if address := jupyterlab.running_at(place):
        # JupyterLab would write what it has open over a file that changes under it.
        if options.update or options.fresh or options.source:
            raise Refused("JupyterLab has your copy open, so nothing in it was replaced. Close "
                          "JupyterLab (Ctrl-C where it was started) and start again")
        if not for_jupyter:
            print(f"JupyterLab runs there already: {address}\nWhat is newer in the course comes "
                  "when you have closed it and start again.")
            return
    else:
        _bring_up_to_date(copy, options)
    if options.copy_only:
        return
    if name := jupyterlab.missing_package():
        raise Refused(f"this Python ({sys.executable}) has no {name}. In the course's folder: "
                      + needs.set_up())
    os.environ.update(jupyterlab.prepare(place / ".course/jupyter"))
    print("JupyterLab starts, which takes some seconds, and prints its address. Ctrl-C ends it.")
    jupyterlab.start(jupyterlab.command(place, for_jupyter, browser=not options.no_browser))


def _check_place(place, root):
    """Keeps a copy out of the course itself and out of folders that hold something else."""
    if place.resolve() == root or root / "chapters" in (place.resolve(), *place.resolve().parents):
        raise Refused(f"{place} is the course itself. Name another folder for your copy")
    ours = (place / ".course").exists() or (place / jupyterlab.FIRST_CHAPTER).exists()
    if place.is_dir() and not ours and any(place.iterdir()):
        raise Refused(f"{place} holds other files. Name a new folder for your copy, such as "
                      f"{place / DEFAULT}")


def _bring_up_to_date(copy, options):
    """Does what the reader asked for, and says what is new."""
    fresh = _chosen(options.fresh, copy.notebooks)
    updates = _chosen([word for word in options.update if word != "all"], copy.course.files)
    if options.source and not options.source.expanduser().is_dir():
        raise Refused(f"{options.source} is not there, or is no folder. Name a folder with "
                      "notebooks of the course")
    added, replaced, newer = copy.refresh()
    if added:
        print(f"New from the course: {_listed(added)}")
    if replaced:
        print(f"Newer from the course, where you had changed nothing: {_listed(replaced)}")
    for name in fresh:
        print(f"{name}: new from the course{_kept_as(copy.update(name, bare=True), copy)}")
    broken = copy.broken()
    for name, why in broken.items():
        print(f"{why}. So it is broken, and JupyterLab cannot open it. `dplab lab --fresh "
              f"{_word_for(name)}` brings a new one, and keeps this file beside it, where you can "
              "still read it as text.")
    waiting = [name for name in newer if name not in fresh]
    if options.update:
        if unread := broken.keys() & {*updates}:
            raise Refused(f"no answers can be read from your {_listed(sorted(unread))}, so nothing "
                          "was brought over")
        found = [name for name in waiting if "all" in options.update or name in updates]
        for name in found:
            print(f"{name}: brought over{_kept_as(copy.update(name), copy)}")
        if not found:
            print("Nothing newer in the course for that.")
    elif waiting:
        print(f"Newer in the course than in your copy: {_listed(waiting)}\n"
              f"  `dplab lab --update {_word_for(waiting[0])}` brings one over with your answers, "
              "`--update all` all of them.")
    if options.source:
        found = copy.answers_from(options.source.expanduser().absolute())
        for name, content in found.items():
            print(f"{name}: your answers are in{_kept_as(copy.replace(name, content), copy)}")
        if not found:
            print(f"No answers in {options.source} that your copy lacks.")


def _chosen(words, names):
    """Those of the names that the reader's words mean: ``4``, ``04`` or ``04_ddp_by_hand``, ``B``
    or ``b`` for an appendix, and ``launch/train.py``.
    """
    found = []
    for word in words:
        meant = [name for name in names if _short(name) == word
                 or _word_for(name) in (word, word.zfill(2), word.upper())]
        if not meant:
            raise Refused(f"the course has no chapter {word}; name one as 04")
        found += meant
    return found


def _word_for(name):
    """What a reader writes for a file; its shortest."""
    key = key_of(Path(name).stem) if name.endswith(".ipynb") else None
    return _short(name) if key is None else label(key)


def _short(name):
    return name.removeprefix("chapters/").removesuffix(".ipynb")


def _listed(names):
    """The files by short names; where there are many, how many more."""
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(map(_short, names[:6])) + more


def _kept_as(kept, copy):
    return f"; as it was: {kept.relative_to(copy.place)}" if kept else ""
