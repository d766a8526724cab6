"""A backend of matplotlib: on a rank, `plt.show` and `Figure.show` show figures in the notebook.

matplotlib imports this file by its name, and nobody else does: a rank without figures needs no
matplotlib.
"""

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from .shown import display


class FigureManager(FigureManagerBase):
    def show(self):
        display(self.canvas.figure)
        Gcf.destroy(self)

    @classmethod
    def pyplot_show(cls, *, block=None):
        for manager in Gcf.get_all_fig_managers():
            manager.show()


class FigureCanvas(FigureCanvasAgg):
    manager_class = FigureManager
