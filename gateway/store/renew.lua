if missing() then
  return reply('MISSING')
end
if fenced() then
  return reply('FENCED')
end
if ahead(false) then
  return reply('MISMATCH')
end
return own(epoch)
