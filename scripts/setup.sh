#!/usr/bin/env bash
# Make this checkout ready to run: `.venv` with the locked Python packages, and the simulators' system packages.
#
#   scripts/setup.sh                 everything
#   scripts/setup.sh --python-only   no system packages: enough for lint, specs, training and inference, no simulator
#
# PYTHON=/path/to/python3.11 chooses the interpreter. Cheap when nothing changed: a stamp in .venv holds a hash of all
# that the environment is made from. Exit codes: 1 failed, 2 wrong arguments, 3 something that has to be installed by
# hand is missing (what, and with which command, is printed).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=$root/.venv
stamp=$venv/.joynexus-setup
log=$venv/setup.log

say() { echo "setup: $*"; }
fail() {
  echo "setup: $1" >&2
  exit "${2:-1}"
}

simulators=yes
case "${1-}" in
  "") ;;
  --python-only) simulators=no ;;
  *) fail "unknown argument '$1'. Use --python-only or nothing." 2 ;;
esac

# Prints the version of an interpreter as 3.11, or nothing if it does not run (a pyenv shim may exist and fail).
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

check_python_override() {
  local version
  version=$(version_of "$PYTHON")
  [[ -n $version ]] || fail "PYTHON=$PYTHON does not run. Set it to a Python 3.11 interpreter."
  [[ $version =~ ^3\.([0-9]+)$ && ${BASH_REMATCH[1]} -ge 11 ]] ||
    fail "PYTHON=$PYTHON is Python $version; joynexus needs 3.11 or newer. Set it to a Python 3.11 interpreter."
  [[ $version == 3.11 ]] ||
    echo "setup: PYTHON=$PYTHON is Python $version; requirements/lock.txt is for 3.11 and may not install." >&2
}

# Sets `python`. The lock was resolved on 3.11, so that is what is looked for; a newer one has to be asked for.
choose_python() {
  local candidate version found=""
  if [[ -n ${PYTHON-} ]]; then
    check_python_override
    python=$PYTHON
    return
  fi
  for candidate in python3.11 python3; do
    version=$(version_of "$candidate")
    if [[ $version == 3.11 ]]; then
      python=$candidate
      return
    fi
    [[ -z $version ]] || found+=" $candidate is $version."
  done
  fail "Python 3.11 is needed, none was found on PATH.${found} Install python3.11, or set PYTHON=/path/to/python3.11." 3
}

# Whether .venv runs, was made in this folder (its scripts hold the path) and is of the version that was asked for.
usable() {
  local version
  [[ -f $venv/bin/pip ]] && head -n 2 "$venv/bin/pip" | grep -qF "$venv/bin/" || return 1
  version=$(version_of "$venv/bin/python")
  [[ -n $version && (-z ${PYTHON-} || $version == "$(version_of "$PYTHON")") ]]
}

# Of all that the environment is made from.
fingerprint() { cat pyproject.toml requirements/lock.txt scripts/setup.sh | sha256sum; }

up_to_date() { [[ -f $stamp && $(<"$stamp") == "$(fingerprint)" ]] && usable; }

make_venv() {
  local python
  choose_python
  say "creating .venv with $python"
  "$python" -c 'import ensurepip' 2>/dev/null ||
    scripts/system_packages.sh "python$(version_of "$python")-venv" || exit $?
  "$python" -m venv --clear "$venv"
}

pip() { PIP_USER=0 "$venv/bin/python" -m pip --no-input "$@"; }

# One pip command for all of the lock: a package that needs torch must not get to choose which torch.
# Chained by hand: `set -e` is off within a function whose result is tested.
install() {
  pip install --progress-bar off -r requirements/lock.txt &&
    pip install --progress-bar off --no-deps -e . &&
    pip check
}

install_python() {
  local started=$SECONDS
  rm -f "$stamp"
  usable || make_venv
  say "installing requirements/lock.txt into .venv (about three minutes the first time; log: .venv/setup.log)"
  if ! install >"$log" 2>&1; then
    tail -n 25 "$log" >&2
    fail "pip failed; the whole log is in .venv/setup.log. Mend the cause and run it again."
  fi
  fingerprint >"$stamp.new"
  mv "$stamp.new" "$stamp"
  say "Python packages are ready after $((SECONDS - started)) s"
}

if [[ $simulators == yes ]]; then
  scripts/system_packages.sh simulators
fi
if ! up_to_date; then
  # Two runs at once (`make demo` beside `make test`): the second waits, then finds nothing left to do.
  exec 9>.setup.lock
  flock 9
  up_to_date || install_python 9>&-
fi
