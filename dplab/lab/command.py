"""The command line of ``dplab lab``."""

import argparse
import errno
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
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Refused(Exception):
    """What the reader asked for cannot be done; the text says why."""


def lab(arguments: list[str]) -> int:
    """Makes or refreshes the working copy, and starts JupyterLab on it; returns an exit status."""
    ours, for_jupyter = _split(arguments)
    options = _parser().parse_args(ours)
    place = Path(options.folder or ROOT / DEFAULT).expanduser().absolute()
    try:
        return _open(place, options, for_jupyter)
    except (NoCourse, Refused) as error:
        return _failed(str(error))
    except UnreadableNotebook as error:
        return _failed(f"{error}. Nothing was changed in it. Mend the file, or move it elsewhere")
    except OSError as error:
        return _failed(_explained(error, place))
    except KeyboardInterrupt:
        print("\nstopped")
        return 130


def _split(arguments):
    """What stands before and behind ``--``."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1:]


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
    parser.add_argument("--import", dest="source", nargs="?", const="", metavar="FROM",
                        help="take over your answers from the clone's chapters/, or from another "
                        "folder with notebooks of the course, where your copy has none")
    parser.add_argument("--no-browser", action="store_true",
                        help="print the address, and open no browser")
    parser.add_argument("--copy-only", action="store_true",
                        help="do all this without starting JupyterLab")
    return parser


def _open(place, options, for_jupyter):
    print(f"The course in a copy of yours: {place}", flush=True)
    course = read_course(ROOT)
    _check_place(place, course.root)
    copy = WorkingCopy(place, course)
    address = jupyterlab.running_at(place)
    asked = options.update or options.fresh or options.source is not None
    try:
        # JupyterLab would write what it has open over a file that changes under it.
        changes = copy.refresh(only_add=address is not None)
    except OSError as error:
        # A copy that is there can be worked in all the same.
        whole = all((place / name).exists() for name in course.files)
        if asked or not whole:
            raise
        _failed(_explained(error, place) + ". Your files are as they were")
        return _start(place, options, for_jupyter, address)
    _tell(changes)
    anew = [] if address else _start_anew(copy, options.fresh)
    _tell_broken(copy)
    waiting = [name for name in changes.newer if name not in anew]
    if address:
        if waiting:
            print(f"Newer in the course: {_listed(waiting)}.")
        if waiting or asked:
            print("JupyterLab has your copy open, so nothing in it was replaced. Close JupyterLab "
                  "(Ctrl-C where it was started) and start again; they come then.")
        if asked:
            return 1
        return _start(place, options, for_jupyter, address)
    for name in _wanted(options.update, waiting, copy):
        print(f"{name}: brought over{_kept_as(copy.update(name), copy)}")
    _import(copy, options.source)
    return _start(place, options, for_jupyter, address, first_time=changes.created)


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
        print(f"{copy.place / name} is broken, so JupyterLab cannot open it ({why}). "
              f"`dplab lab --fresh {_word_for(name)}` brings a new one, and keeps this file beside "
              "it, where you can still read it as text.")


def _start_anew(copy, asked):
    """Brings the notebooks asked for as the course has them; returns their names."""
    notebooks = [name for name in copy.course.files if name.endswith(".ipynb")]
    names = [name for word in asked for name in _meant(word, notebooks)]
    for name in names:
        print(f"{name}: new from the course{_kept_as(copy.start_anew(name), copy)}")
    return names


def _meant(word, names):
    """Those of the names that the reader's word means."""
    if found := [name for name in names if _is_meant(word, name)]:
        return found
    raise Refused(f"the course has no chapter {word}; name one as 04")


def _wanted(asked, waiting, copy):
    """The files of ``waiting`` that the reader asked for; without a word, says what waits."""
    wanted = []
    for word in asked:
        meant = waiting if word == "all" else _meant(word, [*copy.course.files, *waiting])
        if word != "all" and copy.broken().keys() & {*meant}:
            raise Refused(f"no answers can be read from your chapter {word}, so nothing was "
                          "brought over")
        found = [name for name in waiting if name in meant]
        if not found:
            print(f"Nothing newer in the course for {word}.")
        wanted += [name for name in found if name not in wanted]
    if asked or not waiting:
        return wanted
    print(f"Newer in the course than in your copy: {_listed(waiting)}\n"
          f"  `dplab lab --update {_word_for(waiting[0])}` brings one over with your answers, "
          "`--update all` all of them.")
    return []


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


def _import(copy, source):
    """Takes answers over from elsewhere; without the reader's word, says that there are some."""
    if source and not Path(source).expanduser().is_dir():
        raise Refused(f"{source} is not there, or is no folder. Name a folder with notebooks of "
                      "the course")
    found = copy.answers_outside(Path(source).expanduser().absolute() if source else None)
    for path in copy.unreadable:
        print(f"{path} is no notebook, as after a conflict of git. It was left out; mend it, or "
              "bring it back with `git checkout`.")
    if source is None:
        if found:
            print(f"Answers of yours stand in the course's own {_listed(found)}: "
                  "`dplab lab --import` puts them into your copy.")
        return
    if not found:
        print(f"No answers in {source or copy.course.root / 'chapters'} that your copy lacks.")
    for name, content in found.items():
        print(f"{name}: your answers are in{_kept_as(copy.take(name, content), copy)}")


def _kept_as(kept, copy):
    return f"; as it was: {kept.relative_to(copy.place)}" if kept else ""


def _start(place, options, for_jupyter, address, *, first_time=False):
    """``address``: of the JupyterLab that has this copy open already, if one has."""
    if options.copy_only:
        return 0
    if name := jupyterlab.missing_package():
        return _failed(f"this Python ({sys.executable}) has no {name}. In the course's folder: "
                       + needs.set_up())
    environment = jupyterlab.prepare(place / ".course/jupyter")
    if home := environment.get("HOME"):
        print(f"Your home folder takes no files. JupyterLab and your progress are kept in {home}.")
    os.environ.update(environment)
    if not for_jupyter and address:
        print(f"JupyterLab runs there already: {address}")
        return 0
    words = jupyterlab.command(place, for_jupyter, first_time=first_time,
                               browser=not options.no_browser)
    print("JupyterLab starts, which takes some seconds, and prints its address. Ctrl-C ends it.")
    jupyterlab.start(words)


def _listed(names):
    """The files by short names; where there are many, how many more."""
    short = [name.removeprefix("chapters/").removesuffix(".ipynb") for name in names]
    more = f" and {len(short) - 6} more" if len(short) > 6 else ""
    return ", ".join(short[:6]) + more


def _explained(error, place):
    text = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
    if error.errno in _NO_ROOM:
        return (f"{error.strerror}: make room for your copy in {place} and start again; nothing of "
                "yours was changed")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
        return (f"{text}. Name another folder for your copy, such as "
                f"`dplab lab {Path('~') / 'my_course'}`")
    return text


def _failed(text):
    print(f"dplab lab: {text}.", file=sys.stderr)
    return 1
