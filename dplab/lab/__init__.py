"""``dplab lab``: a copy of the course to work in, kept up to date, and JupyterLab on it.

`course_files` reads the course as the clone has it. `working_copy` makes the reader's copy and
brings it up to date. `answers` puts what the reader wrote into a newer chapter. `jupyterlab`
starts JupyterLab. `command` is the command line. Nothing here loads torch.
"""
