#!/usr/bin/env bash
# Install Onedesk: a fixed folder tree with ComfyUI, this pack and its service. What it does is written in service/setup/install.py.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: install.sh [--prefix DIR] [--comfyui PATH [--comfyui-python PY]] [--demo] [--test] [--service]
                  [--models NAME] [--python PY] [--torch SPEC] [--dry-run] [--yes]
       install.sh --uninstall [--prefix DIR]

  --prefix DIR          where everything goes; default ~/dgx-local
  --comfyui PATH        use this ComfyUI: its environment is left as it is, the pack is linked into its custom_nodes
  --comfyui-python PY   the Python that starts that ComfyUI, if it is not in its venv/ or .venv/
  --demo                then draw a picture with the demo models, and print idea, prompt and file
  --test                then install what the tests need and run all checks
  --service             then let `onedesk serve` run as a service of this user (systemd), now and at each login
  --models NAME         then fetch an image model with its Qwen: z-image-turbo, flux2-klein-4b, qwen-image; or OWNER/NAME
  --dry-run             show what was found and what would be installed; change nothing
  --yes                 ask nothing; without a terminal nothing is asked either
  --python PY           Python 3.10 to 3.13 to build on; default: the first one found
  --torch SPEC          the torch for a new environment, as pip install takes it; default: torch 2.13.0, without CUDA where
                        there is no GPU of NVIDIA
  --uninstall           take the installation away; models, data and changed settings stay
  --help                this text

Run it again at any time: what is done is not done twice, and what was interrupted goes on. docs/install.md tells more.
TEXT
}

fail() {
  printf 'install.sh: %s\n' "$1" >&2
  exit "$2"
}

fits() {
  [[ $("$1" -I -S -c 'import sys; print((3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null) == True ]]
}

python=
arguments=()
while (($#)); do
  case $1 in
    --help | -h)
      usage
      exit 0
      ;;
    --python)
      (($# > 1)) || fail "--python needs a Python, such as python3.11" 2
      python=$2
      shift
      ;;
    --python=*) python=${1#--python=} ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

if [[ -n $python ]]; then
  command -v -- "$python" >/dev/null || fail "--python $python: there is no such program" 2
  fits "$python" || fail "--python $python is not Python 3.10 to 3.13" 2
else
  for candidate in python3 python3.12 python3.11 python3.13 python3.10; do
    if command -v "$candidate" >/dev/null && fits "$candidate"; then
      python=$candidate
      break
    fi
  done
  [[ -n $python ]] || fail "no Python 3.10 to 3.13 found; install one with its venv module (Debian, Ubuntu: apt install python3-venv) or name it with --python" 1
fi

here=$(cd -P -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)
exec "$python" -I -B "$here/service/setup/bootstrap.py" install "${arguments[@]+"${arguments[@]}"}"
