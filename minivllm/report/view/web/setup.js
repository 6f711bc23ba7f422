// What the other files share.

const { html, render, useState, useEffect, useRef } = htmPreact;
const SETTINGS = JSON.parse(document.getElementById("settings").textContent);
