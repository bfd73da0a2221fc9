#!/usr/bin/env bash
# One bundle through a pipeline: bundle.sh STEP...
#
# Steps, in this order: build, verify, diff, sign, push. What they work on comes from the environment:
#
#   BUNDLE           the bundle's folder                                            (all steps)
#   MODEL            a checkpoint, as `llama-export build` takes it; may be empty with CONFIG
#   CONFIG           a file that `llama-export export-config` wrote, or empty
#   BUILD_OPTIONS    more options of `build`, separated by spaces
#   VERIFY_OPTIONS   options of `verify`, separated by spaces
#   PREVIOUS         the last release: a folder, or owner/name[@revision] on the hub; empty: none
#   SIGNING_KEY      a private key in PEM form (the text, from a secret); empty: none
#   SIGSTORE         `true` to sign as the job's identity instead
#   PUBLIC_KEY       a file with the public key to check the new signature with, or empty
#   REPOSITORY       owner/name to push to, REVISION its branch (empty: the main one); HF_TOKEN logs in
#
# `diff` writes `changed=true|false`, `sign` writes `signed=true|false` to $GITHUB_OUTPUT, where there
# is one. `build` leaves BUNDLE.recipe.json and `sign` leaves BUNDLE.cdx.json beside the bundle.
set -euo pipefail

: "${BUNDLE:?expected the folder of the bundle}"
MODEL=${MODEL:-} CONFIG=${CONFIG:-} PREVIOUS=${PREVIOUS:-} REPOSITORY=${REPOSITORY:-}
REVISION=${REVISION:-} SIGNING_KEY=${SIGNING_KEY:-} SIGSTORE=${SIGSTORE:-} PUBLIC_KEY=${PUBLIC_KEY:-}
read -ra build_options <<<"${BUILD_OPTIONS:-}"
read -ra verify_options <<<"${VERIFY_OPTIONS:-}"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() {
  echo "error: $*" >&2
  exit 1
}

result() { # NAME=VALUE for the steps that follow
  echo "$1"
  if [[ -n ${GITHUB_OUTPUT:-} ]]; then
    echo "$1" >>"$GITHUB_OUTPUT"
  fi
}

step_build() {
  [[ -n $MODEL || -n $CONFIG ]] || fail "expected MODEL or CONFIG"
  local words=(-o "$BUNDLE")
  if [[ -n $CONFIG ]]; then
    words+=(--config "$CONFIG")
  fi
  words+=("${build_options[@]}")
  if [[ -n $MODEL ]]; then
    words+=(-- "$MODEL")
  fi
  llama-export build "${words[@]}"
  llama-export export-config "$BUNDLE" -o "$BUNDLE.recipe.json"
}

step_verify() {
  llama-export verify "$BUNDLE" "${verify_options[@]}"
}

step_diff() {
  if [[ -z $PREVIOUS ]]; then
    result changed=true
    return
  fi
  local last=$PREVIOUS status=0
  if [[ ! -d $last ]]; then
    last=$scratch/previous
    llama-export pull "$PREVIOUS" -o "$last"
  fi
  # Status 1 is a difference, or a failure if there is an error line, too.
  llama-export diff "$last" "$BUNDLE" 2>"$scratch/diff" || status=$?
  cat "$scratch/diff" >&2
  if ((status > 1)) || grep -q '^error:' "$scratch/diff"; then
    fail "diff failed with status $status"
  fi
  if ((status)); then
    result changed=true
  else
    result changed=false
  fi
}

step_sign() {
  local words=()
  if [[ $SIGSTORE == true ]]; then
    words=(--sigstore)
  elif [[ -n $SIGNING_KEY ]]; then
    (umask 077 && printf '%s\n' "$SIGNING_KEY" >"$scratch/key.pem")
    words=(--private-key "$scratch/key.pem")
  fi
  if ((${#words[@]})); then
    llama-export sign "$BUNDLE" "${words[@]}"
    if [[ -n $PUBLIC_KEY ]]; then
      llama-export verify "$BUNDLE" --signature --public-key "$PUBLIC_KEY"
    fi
    result signed=true
  else
    echo "note: neither SIGNING_KEY nor SIGSTORE is set: the bundle stays unsigned" >&2
    result signed=false
  fi
  llama-export sbom "$BUNDLE" -o "$BUNDLE.cdx.json"
}

step_push() {
  [[ -n $REPOSITORY ]] || fail "expected REPOSITORY"
  local words=()
  if [[ -n $REVISION ]]; then
    words=(--revision "$REVISION")
  fi
  llama-export push "$BUNDLE" "$REPOSITORY" "${words[@]}"
}

(($#)) || fail "expected steps: build verify diff sign push"
for step in "$@"; do
  case $step in
    build | verify | diff | sign | push) echo "== $step" >&2 && "step_$step" ;;
    *) fail "unknown step \`$step\`: expected build, verify, diff, sign or push" ;;
  esac
done
