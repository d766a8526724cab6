# The course in a container, as a normal user:
#
#     docker build -t dplab .
#     docker run --rm -it --shm-size=1g -p 127.0.0.1:8888:8888 \
#         -v dplab:/course/my_course dplab
#
# Then open the address with 127.0.0.1 that it prints. Your work and progress stay in the volume
# `dplab`. Binder builds this file too. The dev container builds its first stage, and sets the course
# up in your clone.
FROM python:3.11-slim-bookworm AS system
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*
# Binder says by these two which user it starts.
ARG NB_USER=learner
ARG NB_UID=1000
RUN useradd --create-home --uid $NB_UID --shell /bin/bash $NB_USER \
    && install --directory --owner=$NB_USER /course
USER $NB_USER
WORKDIR /course

FROM system
ARG NB_UID=1000
ENV PIP_NO_CACHE_DIR=1
# Before the course, so that a change of the course does not fetch it again.
RUN python3 -m venv .venv && .venv/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
COPY --chown=$NB_UID . .
RUN python3 -m venv .venv && .venv/bin/pip install -r requirements.txt
# What Binder starts, and finds by its name.
RUN .venv/bin/pip install -q notebook==7.6.5
RUN .venv/bin/dplab lab --copy-only
ENV PATH=/course/.venv/bin:$PATH DPLAB_HOME=/course/my_course/.dplab
EXPOSE 8888
CMD ["dplab", "lab", "--", "--ip=0.0.0.0"]
