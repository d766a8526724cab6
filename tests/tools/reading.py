"""How a notebook in JupyterLab reaches its reader: by keyboard, to a screen reader, in a narrow
window. Each takes a `jupyter.Notebook`.
"""

import contextlib


def focus_by_tab(notebook, cell, name):
    """Presses Tab, from the top of the cell's output, until the control of that name has the
    focus."""
    notebook.output(cell).evaluate("node => { node.tabIndex = -1; node.focus(); }")
    focused = "() => document.activeElement.getAttribute('aria-label')"
    for _ in range(30):
        notebook.page.keyboard.press("Tab")
        if notebook.page.evaluate(focused) == name:
            return
    raise LookupError(f"Tab does not come to {name!r}")


@contextlib.contextmanager
def window(notebook, width, height):
    """A browser window of another size."""
    before = notebook.page.viewport_size
    notebook.page.set_viewport_size({"width": width, "height": height})
    notebook.page.wait_for_timeout(500)  # JupyterLab lays itself out a moment later
    yield
    notebook.page.set_viewport_size(before)


def cut_off(notebook):
    """The texts of what reaches beyond the window's right edge, of prose, pictures and cards.

    A table or a block of code may: it scrolls in itself.
    """
    return notebook.page.evaluate("""() => {
        const scroller = panel.node.querySelector('.jp-WindowedPanel-outer');
        const edge = scroller.getBoundingClientRect().left + scroller.clientWidth;
        return [...scroller.querySelectorAll('.jp-MarkdownOutput *, .jp-OutputArea-output *')]
            .filter(node => node.getClientRects().length && !node.closest('table, pre')
                && node.getBoundingClientRect().right > edge + 1)
            .map(node => `${node.tagName}: ${(node.alt ?? node.innerText ?? '').slice(0, 60)}`);
    }""")


def clipped_controls(notebook, cell):
    """The texts of labels, values and drop-downs that need more room than they have."""
    return notebook.output(cell).locator(".jupyter-widgets").first.evaluate("""node => {
        const texts = [...node.querySelectorAll('.widget-label, .widget-readout')]
            .filter(each => each.scrollWidth > each.clientWidth
                || each.getBoundingClientRect().right
                   > each.parentElement.getBoundingClientRect().right + 1);
        const choices = [...node.querySelectorAll('select')].filter(each => {
            const free = each.cloneNode(true);  // as wide as its longest choice
            free.style.cssText = 'position: absolute; width: max-content; flex: none;';
            each.parentElement.append(free);
            const needed = free.offsetWidth;
            free.remove();
            return needed > each.offsetWidth;
        });
        return [...texts, ...choices].map(each => each.textContent);
    }""")


def controls_without_name(notebook, cell):
    """The HTML of each control of a widget that tells a screen reader no name."""
    return notebook.output(cell).locator(".jupyter-widgets").first.evaluate("""node =>
        [...node.querySelectorAll('button, input, select, [role=slider]')].filter(control =>
            !(control.getAttribute('aria-label') || control.title || control.innerText.trim()
              || control.labels?.length)).map(control => control.outerHTML)""")
