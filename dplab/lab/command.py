"""The command line of ``dplab lab``."""

import argparse
import os
import sys
from pathlib import Path

from dplab import needs
from dplab.desk.course import key_of, label
from dplab.lab import jupyterlab
from dplab.lab.course_files import ROOT, NoCourse, read_course
from dplab.lab.notebook import UnreadableNotebook
from dplab.lab.working_copy import WorkingCopy

DEFAULT = "my_course"


class Refused(Exception):
    """What the reader asked for cannot be done; the text says why."""


def lab(arguments: list[str]) -> int:
    """Makes or refreshes the working copy, and starts JupyterLab on it; returns an exit status."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:at])
    place = Path(options.folder or ROOT / DEFAULT).expanduser().absolute()
    try:
        return _open(place, options, arguments[at + 1:])
    except (NoCourse, Refused) as error:
        return _failed(str(error))
    except UnreadableNotebook as error:
        return _failed(f"{error}. Nothing was changed in it. Mend the file, or move it elsewhere")
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _failed(f"{error.strerror or error}{where}. Nothing of yours was changed. Make room "
                       f"in {place}, or name another folder for your copy, such as `dplab lab "
                       "~/my_course`")
    except KeyboardInterrupt:
        print("\nstopped")
        return 130


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
    course, is_new = read_course(ROOT), False
    _check_place(place, course.root)
    if address := jupyterlab.running_at(place):
        # JupyterLab would write what it has open over a file that changes under it.
        if options.update or options.fresh or options.source:
            raise Refused("JupyterLab has your copy open, so nothing in it was replaced. Close "
                          "JupyterLab (Ctrl-C where it was started) and start again")
        if not for_jupyter:
            print(f"JupyterLab runs there already: {address}\nWhat is newer in the course comes "
                  "when you have closed it and start again.")
            return 0
    else:
        is_new = _bring_up_to_date(WorkingCopy(place, course), options)
    return 0 if options.copy_only else _start(place, options, for_jupyter, is_new)


def _bring_up_to_date(copy, options):
    """Does what the reader asked for, and says what is new; returns whether the copy is."""
    files = copy.course.files
    fresh = _chosen(options.fresh, [name for name in files if name.endswith(".ipynb")])
    updates = [] if "all" in options.update else _chosen(options.update, files)
    if options.source and not options.source.expanduser().is_dir():
        raise Refused(f"{options.source} is not there, or is no folder. Name a folder with "
                      "notebooks of the course")
    changes = copy.refresh()
    _tell(changes)
    for name in fresh:
        print(f"{name}: new from the course{_kept_as(copy.update(name, bare=True), copy)}")
    _tell_broken(copy)
    waiting = [name for name in changes.newer if name not in fresh]
    if options.update:
        _update(waiting if "all" in options.update else updates, waiting, copy)
    elif waiting:
        print(f"Newer in the course than in your copy: {_listed(waiting)}\n"
              f"  `dplab lab --update {_word_for(waiting[0])}` brings one over with your answers, "
              "`--update all` all of them.")
    if options.source:
        found = copy.answers_from(options.source.expanduser().absolute())
        for name, content in found.items():
            print(f"{name}: your answers are in{_kept_as(copy.take(name, content), copy)}")
        if not found:
            print(f"No answers in {options.source} that your copy lacks.")
    return changes.created


def _check_place(place, root):
    """Keeps a copy out of the course itself and out of folders that hold something else."""
    if place.resolve() == root or root / "chapters" in (place.resolve(), *place.resolve().parents):
        raise Refused(f"{place} is the course itself. Name another folder for your copy")
    ours = (place / ".course").exists() or (place / jupyterlab.FIRST_CHAPTER).exists()
    if place.is_dir() and not ours and any(place.iterdir()):
        raise Refused(f"{place} holds other files. Name a new folder for your copy, such as "
                      f"{place / DEFAULT}")


def _tell(changes):
    if changes.created:
        print(f"It is new: {len(changes.added)} files, without outputs.")
    elif changes.added:
        print(f"New from the course: {_listed(changes.added)}")
    if changes.replaced:
        print(f"Newer from the course, where you had changed nothing: {_listed(changes.replaced)}")


def _tell_broken(copy):
    for name, why in copy.broken().items():
        print(f"{why}. So it is broken, and JupyterLab cannot open it. `dplab lab --fresh "
              f"{_word_for(name)}` brings a new one, and keeps this file beside it, where you can "
              "still read it as text.")


def _chosen(words, names):
    """Those of the names that the reader's words mean."""
    found = {word: [name for name in names if _is_meant(word, name)] for word in words}
    for word, meant in found.items():
        if not meant:
            raise Refused(f"the course has no chapter {word}; name one as 04")
    return [name for meant in found.values() for name in meant]


def _update(names, waiting, copy):
    """Brings those of the names over that wait."""
    if broken := copy.broken().keys() & {*names}:
        raise Refused(f"no answers can be read from your {_listed(sorted(broken))}, so nothing was "
                      "brought over")
    found = [name for name in waiting if name in names]
    for name in found:
        print(f"{name}: brought over{_kept_as(copy.update(name), copy)}")
    if not found:
        print("Nothing newer in the course for that.")


def _is_meant(word, name):
    """``04`` or ``4`` means chapters/04_ddp_by_hand.ipynb, ``10`` also what lies in launch, and
    ``B`` or ``b`` an appendix.
    """
    short = name.removeprefix("chapters/")
    number = word.zfill(2) if word.isdecimal() else word
    return (short.startswith(f"{number}_") or word in (name, short, Path(name).stem)
            or word.upper() == _word_for(name))


def _word_for(name):
    key = key_of(Path(name).stem) if name.endswith(".ipynb") else None
    return name.removeprefix("chapters/") if key is None else label(key)


def _kept_as(kept, copy):
    return f"; as it was: {kept.relative_to(copy.place)}" if kept else ""


def _start(place, options, for_jupyter, is_new):
    if name := jupyterlab.missing_package():
        return _failed(f"this Python ({sys.executable}) has no {name}. In the course's folder: "
                       + needs.set_up())
    os.environ.update(jupyterlab.prepare(place / ".course/jupyter"))
    words = jupyterlab.command(place, for_jupyter, first_time=is_new,
                               browser=not options.no_browser)
    print("JupyterLab starts, which takes some seconds, and prints its address. Ctrl-C ends it.")
    jupyterlab.start(words)


def _listed(names):
    """The files by short names; where there are many, how many more."""
    short = [name.removeprefix("chapters/").removesuffix(".ipynb") for name in names]
    more = f" and {len(short) - 6} more" if len(short) > 6 else ""
    return ", ".join(short[:6]) + more


def _failed(text):
    print(f"dplab lab: {text}.", file=sys.stderr)
    return 1
