# StreamCLR on a CPU. docs/docker.md says how to use it: docker build -t streamclr . && docker compose up
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /opt/streamclr
ENV PATH=/opt/streamclr/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# The packages first: they change rarely, and are nearly all of the image.
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
RUN mkdir -p src/streamclr && touch src/streamclr/__init__.py \
    && pip install -c constraints.txt '.[video,serve,export]' \
    && pip uninstall --yes streamclr
COPY src src
RUN pip install --no-deps .

FROM python:3.12-slim
# The group "video" is that of /dev/video0 on the host: 44 on Debian and its kin.
RUN useradd --uid 10001 --user-group --groups video --home-dir /data --create-home --shell /usr/sbin/nologin streamclr \
    && mkdir /data/runs && chown 10001:10001 /data/runs
COPY --from=build /opt/streamclr /opt/streamclr
ENV PATH=/opt/streamclr/bin:$PATH XDG_CACHE_HOME=/data/cache PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8765
STOPSIGNAL SIGTERM
# That a run is at work: it serves this with --metrics 9108. torch may take minutes to load from an SD card.
HEALTHCHECK --interval=30s --timeout=10s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:9108/metrics', timeout=5)"]
ENTRYPOINT ["streamclr"]
CMD ["--help"]
