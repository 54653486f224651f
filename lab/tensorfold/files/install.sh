# Runs as root inside the image tree: aiohttp and the double's program into /opt/tensorfold.
# Shown by the lab: /lab/requirements.txt (locked), /lab/wheels (kept for the next build), /lab/program, /lab/files.
python3 -m venv /opt/tensorfold
pip=/opt/tensorfold/bin/pip
# From the kept wheels alone when they are all there: a changed program then costs no download.
install_packages() {
    "$pip" install --quiet --no-compile --no-cache-dir --no-index --find-links /lab/wheels --require-hashes \
        -r /lab/requirements.txt
}
if ! install_packages 2>/tmp/missing; then
    "$pip" download --quiet --no-cache-dir --require-hashes --dest /lab/wheels -r /lab/requirements.txt
    install_packages
fi
site=$(/opt/tensorfold/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$site"/pip "$site"/pip-*.dist-info "$site"/setuptools "$site"/setuptools-*.dist-info "$site"/_distutils_hack \
    "$site"/pkg_resources "$site"/distutils-precedence.pth /opt/tensorfold/bin/pip*
cp -r /lab/program "$site/tensorfold"
find "$site" -name __pycache__ -type d -prune -exec rm -rf {} +
/opt/tensorfold/bin/python -m compileall -q "$site"
install -m 0755 /lab/files/tensorfold /opt/tensorfold/bin/tensorfold
install -D -m 0755 /lab/files/nvidia_entrypoint.sh /opt/nvidia/nvidia_entrypoint.sh
mkdir /workspace
